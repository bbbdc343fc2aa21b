// Dot products of unsigned weights and signed activations, four at a time into 32-bit lanes.
#pragma once

#include "vec.h"

namespace quire {

#if defined(QUIRE_AVX512)
using vi = __m512i;
QUIRE_INLINE vi vset_int(int32_t x) { return _mm512_set1_epi32(x); }
QUIRE_INLINE vf vfloat(vi x) { return _mm512_cvtepi32_ps(x); }
#elif defined(QUIRE_AVX2)
using vi = __m256i;
QUIRE_INLINE vi vset_int(int32_t x) { return _mm256_set1_epi32(x); }
QUIRE_INLINE vf vfloat(vi x) { return _mm256_cvtepi32_ps(x); }
#else
typedef int32_t vi __attribute__((vector_size(16)));
QUIRE_INLINE vi vset_int(int32_t x) { return vi{x, x, x, x}; }
QUIRE_INLINE vf vfloat(vi x) { return __builtin_convertvector(x, vf); }
#endif

#if defined(QUIRE_AVX512) && defined(__AVX512VNNI__)

constexpr int kQuadUnits = 1;
using Bytes = vi;
using Quad = vi;
struct Nibbles {
  vi low, high;
};
QUIRE_INLINE Bytes load_bytes(const char* p) { return _mm512_loadu_si512(p); }
QUIRE_INLINE Nibbles load_nibbles(const char* p) {
  const vi both = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(15);
  return {_mm512_and_si512(both, mask), _mm512_and_si512(_mm512_srli_epi32(both, 4), mask)};
}
QUIRE_INLINE Quad load_quad(const uint32_t* p) { return _mm512_set1_epi32(int(*p)); }
QUIRE_INLINE vi vdot(vi sum, Bytes b, Quad x) { return _mm512_dpbusd_epi32(sum, b, x); }
QUIRE_INLINE vi vdot_small(vi sum, Nibbles b, Quad low, Quad high) {
  return vdot(vdot(sum, b.low, low), b.high, high);
}

#elif defined(QUIRE_AVX2) && defined(__AVXVNNI__)

constexpr int kQuadUnits = 1;
using Bytes = vi;
using Quad = vi;
struct Nibbles {
  vi low, high;
};
QUIRE_INLINE Bytes load_bytes(const char* p) { return _mm256_loadu_si256((const __m256i*)p); }
QUIRE_INLINE Nibbles load_nibbles(const char* p) {
  const vi both = load_bytes(p), mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(both, mask), _mm256_and_si256(_mm256_srli_epi32(both, 4), mask)};
}
QUIRE_INLINE Quad load_quad(const uint32_t* p) { return _mm256_set1_epi32(int(*p)); }
QUIRE_INLINE vi vdot(vi sum, Bytes b, Quad x) { return _mm256_dpbusd_avx_epi32(sum, b, x); }
QUIRE_INLINE vi vdot_small(vi sum, Nibbles b, Quad low, Quad high) {
  return vdot(vdot(sum, b.low, low), b.high, high);
}

#elif defined(QUIRE_AVX512) || defined(QUIRE_AVX2)

// No dot product of bytes that can't overflow: 16-bit products instead. A quad of x is kept as two
// pairs of 16-bit values, (0, 2) and (1, 3), for the even and the odd bytes of the weights.
constexpr int kQuadUnits = 2;
struct Bytes {
  vi even, odd;
};
struct Quad {
  vi even, odd;
};
struct Nibbles {
  Bytes low, high;
};
#if defined(QUIRE_AVX512)
QUIRE_INLINE vi load_raw(const char* p) { return _mm512_loadu_si512(p); }
QUIRE_INLINE Bytes split(vi b) {
  return {_mm512_and_si512(b, _mm512_set1_epi16(255)), _mm512_srli_epi16(b, 8)};
}
QUIRE_INLINE vi low_nibbles(vi b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
QUIRE_INLINE vi high_nibbles(vi b) { return low_nibbles(_mm512_srli_epi16(b, 4)); }
QUIRE_INLINE vi vdot(vi sum, Bytes b, Quad x) {
  sum = _mm512_add_epi32(sum, _mm512_madd_epi16(b.even, x.even));
  return _mm512_add_epi32(sum, _mm512_madd_epi16(b.odd, x.odd));
}
#else
QUIRE_INLINE vi load_raw(const char* p) { return _mm256_loadu_si256((const __m256i*)p); }
QUIRE_INLINE Bytes split(vi b) {
  return {_mm256_and_si256(b, _mm256_set1_epi16(255)), _mm256_srli_epi16(b, 8)};
}
QUIRE_INLINE vi low_nibbles(vi b) { return _mm256_and_si256(b, _mm256_set1_epi8(15)); }
QUIRE_INLINE vi high_nibbles(vi b) { return low_nibbles(_mm256_srli_epi16(b, 4)); }
QUIRE_INLINE vi vdot(vi sum, Bytes b, Quad x) {
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(b.even, x.even));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(b.odd, x.odd));
}
#endif
QUIRE_INLINE Bytes load_bytes(const char* p) { return split(load_raw(p)); }
QUIRE_INLINE Nibbles load_nibbles(const char* p) {
  const vi both = load_raw(p);
  return {split(low_nibbles(both)), split(high_nibbles(both))};
}
QUIRE_INLINE Quad load_quad(const uint32_t* p) { return {vset_int(int(p[0])), vset_int(int(p[1]))}; }
QUIRE_INLINE vi vdot_small(vi sum, Nibbles b, Quad low, Quad high) {
  return vdot(vdot(sum, b.low, low), b.high, high);
}

#else

constexpr int kQuadUnits = 1;
struct Bytes {
  const uint8_t* at;
};
struct Quad {
  const int8_t* at;
};
using Nibbles = Bytes;
QUIRE_INLINE Bytes load_bytes(const char* p) { return {reinterpret_cast<const uint8_t*>(p)}; }
QUIRE_INLINE Nibbles load_nibbles(const char* p) { return load_bytes(p); }
QUIRE_INLINE Quad load_quad(const uint32_t* p) { return {reinterpret_cast<const int8_t*>(p)}; }
QUIRE_INLINE vi vdot(vi sum, Bytes b, Quad x) {
  for (int lane = 0; lane < 4; lane++)
    for (int i = 0; i < 4; i++) sum[lane] += b.at[lane * 4 + i] * x.at[i];
  return sum;
}
QUIRE_INLINE vi vdot_small(vi sum, Nibbles b, Quad low, Quad high) {
  for (int lane = 0; lane < 4; lane++)
    for (int i = 0; i < 4; i++)
      sum[lane] += (b.at[lane * 4 + i] & 15) * low.at[i] + (b.at[lane * 4 + i] >> 4) * high.at[i];
  return sum;
}

#endif

// Lays `count` values of x out as load_quad reads them.
inline void store_quads(uint32_t* to, const int8_t* q, int64_t count) {
  if (kQuadUnits == 1) {
    std::memcpy(to, q, count);
    return;
  }
  int16_t* out = reinterpret_cast<int16_t*>(to);
  for (int64_t i = 0; i < count; i += 4, out += 4) {
    out[0] = q[i], out[1] = q[i + 2], out[2] = q[i + 1], out[3] = q[i + 3];
  }
}

}  // namespace quire
