// Weights that are codes of floats, a scale for each group of k: e4m3, and entries of a table of 16.
//
// A step is one group of a panel: its codes, then NR scales in float32. Of e4m3 words of 32 bits hold
// two k of two columns, so that a shift and a mask make halves of them (value / 256; the scales make
// up for it); of a table a word holds eight k of one column, the first one lowest.
#pragma once

#include "linear.h"

namespace quire {

constexpr bool is_coded(Format format) { return format == kFloat8 || format == kTable4; }

inline int64_t coded_bytes(Format format, int64_t group) {
  return (format == kFloat8 ? group : group / 2) * NR + NR * 4;
}

// What e4m3 is brought to as a half: eeee mmm of a byte under an exponent of one bit more.
constexpr float kFloat8Scale = 256.0f;
inline f16 half_of(uint8_t code) {
  return {static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7)};
}
constexpr bool is_nan_code(uint8_t code) { return (code & 0x7f) == 0x7f; }

// Writes column j of group g of a panel: `count` codes, the rest of the group is zeros.
void put_codes(const Packed& w, int64_t panel, int64_t g, int64_t j, const uint8_t* codes,
               int64_t count, float scale);

// Column j of a group at `step`: the first `count` weights.
void unpack_codes(const Packed& w, const char* step, int64_t j, float* out, int64_t count);

}  // namespace quire
