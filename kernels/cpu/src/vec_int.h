// Dot products of weights and signed activations in bytes, four at a time into 32-bit lanes, or two
// at a time on CPUs without an instruction for four.
//
// int4 weights are unsigned nibbles. int8 weights are stored with an offset, kInt8Offset, which
// makes them unsigned where the instructions require it.
#pragma once

#include "vec.h"

namespace quire {

#if defined(QUIRE_AVX512)
using vi = __m512i;
using vi_unaligned = __m512i_u;
QUIRE_INLINE vi vset_int(int32_t x) { return _mm512_set1_epi32(x); }
QUIRE_INLINE vf vfloat(vi x) { return _mm512_cvtepi32_ps(x); }
#elif defined(QUIRE_AVX2)
using vi = __m256i;
using vi_unaligned = __m256i_u;
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
  // With the intrinsic, GCC adds two copies of its sum around each of these.
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

// There is no exact product of bytes here: the sum of two products of an unsigned and a signed byte
// overflows its 16 bits. So int8 weights are widened and multiplied as pairs of 16 bits. This takes
// as many multiplications as bytes that are made to fit, and otherwise only additions. Nibbles fit,
// a few of them.
#define QUIRE_PAIRS 1
constexpr int kInt8Offset = 0;
using Bytes = vi;
using Quad = vi;
struct Nibbles {
  vi low, high;
};
QUIRE_INLINE Quad load_quad(const uint32_t* p) { return vset_int(int(*p)); }
#if defined(QUIRE_AVX512)
QUIRE_INLINE Bytes load_bytes(const char* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
}
QUIRE_INLINE Nibbles load_nibbles(const char* p) {
  const vi both = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(15);
  return {_mm512_and_si512(both, mask), _mm512_and_si512(_mm512_srli_epi16(both, 4), mask)};
}
QUIRE_INLINE vi vdot(vi sum, Bytes b, Quad x) {
  return _mm512_add_epi32(sum, _mm512_madd_epi16(b, x));
}
QUIRE_INLINE vi vdot_small(vi sum, Nibbles b, Quad low, Quad high) {
  return _mm512_add_epi16(_mm512_add_epi16(sum, _mm512_maddubs_epi16(b.low, low)),
                          _mm512_maddubs_epi16(b.high, high));
}
QUIRE_INLINE vi widen(vi sum, vi words) { return vdot(sum, words, _mm512_set1_epi16(1)); }
#else
QUIRE_INLINE Bytes load_bytes(const char* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
}
QUIRE_INLINE Nibbles load_nibbles(const char* p) {
  const vi both = _mm256_loadu_si256((const __m256i*)p), mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(both, mask), _mm256_and_si256(_mm256_srli_epi16(both, 4), mask)};
}
QUIRE_INLINE vi vdot(vi sum, Bytes b, Quad x) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(b, x));
}
QUIRE_INLINE vi widen(vi sum, vi words) { return vdot(sum, words, _mm256_set1_epi16(1)); }
#endif
// Values of k whose products with nibbles are summed in words: 8 sums of two, 8 * 2 * 15 * 127 <
// 2^15.
constexpr int64_t kNibbleRun = 32;

#else

constexpr int kInt8Offset = 128;
struct Bytes {
  const uint8_t* at;
};
struct LookedUp {
  const uint8_t *at, *table;
};
struct Quad {
  const int8_t* at;
};
struct Nibbles {
  const uint8_t* at;
};
QUIRE_INLINE Bytes load_bytes(const char* p) { return {reinterpret_cast<const uint8_t*>(p)}; }
QUIRE_INLINE Nibbles load_nibbles(const char* p) { return {reinterpret_cast<const uint8_t*>(p)}; }
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
QUIRE_INLINE LookedUp look_up(Nibbles codes, const uint8_t* table) { return {codes.at, table}; }
QUIRE_INLINE vi vdot_small(vi sum, LookedUp b, Quad low, Quad high) {
  for (int lane = 0; lane < 4; lane++) {
    for (int i = 0; i < 4; i++) {
      const uint8_t both = b.at[lane * 4 + i];
      sum[lane] += b.table[both & 15] * low.at[i] + b.table[both >> 4] * high.at[i];
    }
  }
  return sum;
}

#endif

#if defined(QUIRE_AVX512)
QUIRE_INLINE vi repeat16(const uint8_t* p) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p));
}
// Looks up entries of a table of 16 bytes.
QUIRE_INLINE Nibbles look_up(Nibbles codes, const uint8_t* table) {
  const vi entries = repeat16(table);
  return {_mm512_shuffle_epi8(entries, codes.low), _mm512_shuffle_epi8(entries, codes.high)};
}
#elif defined(QUIRE_AVX2)
QUIRE_INLINE vi repeat16(const uint8_t* p) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
}
QUIRE_INLINE Nibbles look_up(Nibbles codes, const uint8_t* table) {
  const vi entries = repeat16(table);
  return {_mm256_shuffle_epi8(entries, codes.low), _mm256_shuffle_epi8(entries, codes.high)};
}
#endif

// Values of k in one 32-bit unit of x for int8 weights: bytes, or words for pairs.
#ifdef QUIRE_PAIRS
constexpr int kInt8Unit = 2;
#else
constexpr int kInt8Unit = 4;
#endif

// sums of one row += x at `a` times two vectors of weights.
#if defined(QUIRE_PAIRS) && defined(QUIRE_AVX2)
// Sums take all registers but four: otherwise GCC multiplies ahead and runs out of registers.
QUIRE_INLINE void dot_row(vi (&sums)[2], Bytes b0, Bytes b1, const uint32_t* a) {
  vi x, y;
  asm volatile(
      "vpbroadcastd %6, %2\n vpmaddwd %2, %4, %3\n vpaddd %3, %0, %0\n"
      "vpmaddwd %2, %5, %2\n vpaddd %2, %1, %1"
      : "+x"(sums[0]), "+x"(sums[1]), "=&x"(x), "=&x"(y)
      : "x"(b0), "x"(b1), "m"(*a));
}
QUIRE_INLINE void dot_row(vi (&sums)[2], Nibbles b0, Nibbles b1, const uint32_t* a) {
  vi x, y;
  asm volatile(
      "vpbroadcastd %8, %2\n vpmaddubsw %2, %4, %3\n vpaddw %3, %0, %0\n"
      "vpmaddubsw %2, %6, %2\n vpaddw %2, %1, %1\n"
      "vpbroadcastd %9, %2\n vpmaddubsw %2, %5, %3\n vpaddw %3, %0, %0\n"
      "vpmaddubsw %2, %7, %2\n vpaddw %2, %1, %1"
      : "+x"(sums[0]), "+x"(sums[1]), "=&x"(x), "=&x"(y)
      : "x"(b0.low), "x"(b0.high), "x"(b1.low), "x"(b1.high), "m"(a[0]), "m"(a[1]));
}
#else
QUIRE_INLINE void dot_row(vi (&sums)[2], Bytes b0, Bytes b1, const uint32_t* a) {
  const Quad x = load_quad(a);
  sums[0] = vdot(sums[0], b0, x);
  sums[1] = vdot(sums[1], b1, x);
}
template <class Four>
QUIRE_INLINE void dot_row(vi (&sums)[2], Four b0, Four b1, const uint32_t* a) {
  const Quad low = load_quad(a), high = load_quad(a + 1);
  sums[0] = vdot_small(sums[0], b0, low, high);
  sums[1] = vdot_small(sums[1], b1, low, high);
}
#endif

}  // namespace quire
