// Dot products of weights and signed activations in bytes, four at a time into 32-bit lanes.
//
// int4 weights are unsigned nibbles. int8 weights are stored with an offset, kInt8Offset, that makes
// them unsigned where the instructions want them so.
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

constexpr int kInt8Offset = 128;
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
QUIRE_INLINE vi vdot(vi sum, Bytes b, Quad x) {
  // As an intrinsic, GCC wraps each of these into two copies of its sum.
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(b), "v"(x));
  return sum;
}
QUIRE_INLINE vi vdot_small(vi sum, Nibbles b, Quad low, Quad high) {
  return vdot(vdot(sum, b.low, low), b.high, high);
}

#elif defined(QUIRE_AVX2) && defined(__AVXVNNI__)

constexpr int kInt8Offset = 128;
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
QUIRE_INLINE vi vdot(vi sum, Bytes b, Quad x) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(b), "x"(x));
  return sum;
}
QUIRE_INLINE vi vdot_small(vi sum, Nibbles b, Quad low, Quad high) {
  return vdot(vdot(sum, b.low, low), b.high, high);
}

#elif defined(QUIRE_AVX512) || defined(QUIRE_AVX2)

// Bytes are multiplied as magnitude times signed x: 2 * 127 * 127 fits the 16 bits of a pair's sum,
// as 2 * 255 * 127 would not.
constexpr int kInt8Offset = 0;
struct Bytes {
  vi signs, magnitudes;
};
using Quad = vi;
struct Nibbles {
  vi low, high;
};
QUIRE_INLINE Quad load_quad(const uint32_t* p) { return vset_int(int(*p)); }
#if defined(QUIRE_AVX512)
QUIRE_INLINE vi load_raw(const char* p) { return _mm512_loadu_si512(p); }
QUIRE_INLINE Bytes load_bytes(const char* p) { return {load_raw(p), _mm512_abs_epi8(load_raw(p))}; }
QUIRE_INLINE vi low_nibbles(vi b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
QUIRE_INLINE vi high_nibbles(vi b) { return low_nibbles(_mm512_srli_epi16(b, 4)); }
QUIRE_INLINE vi signed_as(vi x, vi signs) {
  return _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(signs), _mm512_setzero_si512(), x);
}
QUIRE_INLINE vi pairs(vi b, vi x) { return _mm512_maddubs_epi16(b, x); }
QUIRE_INLINE vi add_pairs(vi a, vi b) { return _mm512_add_epi16(a, b); }
QUIRE_INLINE vi widen(vi sum, vi both) {
  return _mm512_add_epi32(sum, _mm512_madd_epi16(both, _mm512_set1_epi16(1)));
}
#else
QUIRE_INLINE vi load_raw(const char* p) { return _mm256_loadu_si256((const __m256i*)p); }
QUIRE_INLINE Bytes load_bytes(const char* p) { return {load_raw(p), _mm256_abs_epi8(load_raw(p))}; }
QUIRE_INLINE vi low_nibbles(vi b) { return _mm256_and_si256(b, _mm256_set1_epi8(15)); }
QUIRE_INLINE vi high_nibbles(vi b) { return low_nibbles(_mm256_srli_epi16(b, 4)); }
QUIRE_INLINE vi signed_as(vi x, vi signs) { return _mm256_sign_epi8(x, signs); }
QUIRE_INLINE vi pairs(vi b, vi x) { return _mm256_maddubs_epi16(b, x); }
QUIRE_INLINE vi add_pairs(vi a, vi b) { return _mm256_add_epi16(a, b); }
QUIRE_INLINE vi widen(vi sum, vi both) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(both, _mm256_set1_epi16(1)));
}
#endif
QUIRE_INLINE Nibbles load_nibbles(const char* p) {
  const vi both = load_raw(p);
  return {low_nibbles(both), high_nibbles(both)};
}
QUIRE_INLINE vi vdot(vi sum, Bytes b, Quad x) {
  return widen(sum, pairs(b.magnitudes, signed_as(x, b.signs)));
}
QUIRE_INLINE vi vdot_small(vi sum, Nibbles b, Quad low, Quad high) {
  return widen(sum, add_pairs(pairs(b.low, low), pairs(b.high, high)));
}

#else

constexpr int kInt8Offset = 128;
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

}  // namespace quire
