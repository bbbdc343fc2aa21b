// Weights in e4m3: floats of 8 bits, with a float32 scale for each group of k.
//
// A step is one group of a panel: for each two k NR words of 16 bits, the first one's code in the low
// byte, then NR scales. A shift and a mask bring a code under the exponent of a wider float, which is
// then a power of two too small: the scales make up for it.
#pragma once

#include "linear.h"

namespace quire {

// With AVX2 that float is a bfloat16, since two of them widen by an instruction each: 2^-120. It and
// products with it would be too small, so x is 2^60 times what it was. Elsewhere it's a float16.
#if defined(QUIRE_AVX2)
constexpr float kXFactor = 0x1p60f, kScaleFactor = 0x1p60f;
#else
constexpr float kXFactor = 1.0f, kScaleFactor = 0x1p8f;
#endif

// The place of column j among the words of two k: with AVX2 lanes of 128 bits widen by themselves.
inline int64_t word_of(int64_t j) {
#if defined(QUIRE_AVX2)
  return (j & 3) | (j & 4) << 1 | (j & 8) >> 1;
#else
  return j;
#endif
}
inline int64_t byte_of(int64_t j, int64_t i) { return i / 2 * NR * 2 + 2 * word_of(j) + i % 2; }

inline int64_t float8_bytes(int64_t group) { return group * NR + NR * 4; }

// Writes column j of group g of a panel: `count` codes, the rest of the group is zeros.
void put_float8(const Packed& w, int64_t panel, int64_t g, int64_t j, const uint8_t* codes,
                int64_t count, float scale);

// Column j of a group at `step`: its first `count` weights.
void read_float8(const Packed& w, const char* step, int64_t j, float* out, int64_t count);

}  // namespace quire
