// Weights of 4 and 8 bits as 16-bit words: table entries, and 8-bit floats. Pairs of them are
// multiplied by pairs of words of x. If four bytes can be multiplied at a time, the high and the
// low bytes of four table entries are multiplied by four bytes of x separately.
#pragma once

#include "vec_int.h"

namespace quire {

// CPUs that multiply pairs of bf16 and look up 128 bytes convert 8-bit floats in another way, see
// linear_float8.cpp.
#if defined(QUIRE_AVX512) && defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define QUIRE_FLOAT8_PAIRS 1
constexpr float kFloat8Step = 1.0f;
#else
constexpr float kFloat8Step = 0x1p-5f;
#endif

#if (defined(QUIRE_AVX512) || defined(QUIRE_AVX2)) && !defined(QUIRE_PAIRS)
#define QUIRE_PLANES 1
#endif

// Floats of 8 bits, e4m3, as multiples of 2^-5: exact from 0.25 on, smaller ones rounded to
// nearest, by at most 2^-6, which is 2^-14.8 of the largest. A code's last four bits (one of the
// exponent, three of the mantissa) give one factor, times 4 * 2^8. The sign and the exponent's
// first three bits give the other one. The product's upper 17 bits are used, rounded.
alignas(16) constexpr uint8_t kParts[16] = {32, 36, 40, 44, 48, 52,  56,  60,
                                            64, 72, 80, 88, 96, 104, 112, 120};
alignas(16) constexpr uint8_t kFactors[32] = {
    1, 4, 16, 64, 0, 0, 0,  0,  0xff, 0xfc, 0xf0, 0xc0, 0,    0,    0,    0,
    0, 0, 0,  0,  1, 4, 16, 64, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfc, 0xf0, 0xc0};

inline int16_t word_of(uint8_t code) {
  const int start = code >> 4;
  const int factor = static_cast<int16_t>(kFactors[start] | kFactors[16 + start] << 8);
  return static_cast<int16_t>((kParts[code & 15] * 256 * factor + (1 << 14)) >> 15);
}

// The kernels' value of a code, in units of kFloat8Step.
inline float float8_of(uint8_t code) {
#ifdef QUIRE_FLOAT8_PAIRS
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float size = exponent ? std::ldexp(float(8 + mantissa), exponent - 10)
                              : std::ldexp(float(mantissa), -9);
  return code & 128 ? -size : size;
#else
  return word_of(code);
#endif
}

// The few instructions for loads, for both widths.
#if defined(QUIRE_AVX512)
QUIRE_INLINE vi vload_codes(const char* p) { return _mm512_loadu_si512(p); }
QUIRE_INLINE void vstore_codes(char* p, vi x) { _mm512_storeu_si512(p, x); }
QUIRE_INLINE vi vnibbles_low(vi x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
QUIRE_INLINE vi vnibbles_high(vi x) { return vnibbles_low(_mm512_srli_epi16(x, 4)); }
QUIRE_INLINE vi vpick_bytes(vi table, vi at) { return _mm512_shuffle_epi8(table, at); }
QUIRE_INLINE vi vpairs_first(vi low, vi high) { return _mm512_unpacklo_epi8(low, high); }
QUIRE_INLINE vi vpairs_last(vi low, vi high) { return _mm512_unpackhi_epi8(low, high); }
QUIRE_INLINE vi vround_product(vi a, vi b) { return _mm512_mulhrs_epi16(a, b); }
QUIRE_INLINE vi vdot_words(vi sum, vi b, uint32_t x) {
#if defined(__AVX512VNNI__)
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(b), "v"(vset_int(int(x))));
  return sum;
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(b, vset_int(int(x))));
#endif
}
#elif defined(QUIRE_AVX2)
QUIRE_INLINE vi vload_codes(const char* p) { return _mm256_loadu_si256((const __m256i*)p); }
QUIRE_INLINE void vstore_codes(char* p, vi x) { _mm256_storeu_si256((__m256i*)p, x); }
QUIRE_INLINE vi vnibbles_low(vi x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
QUIRE_INLINE vi vnibbles_high(vi x) { return vnibbles_low(_mm256_srli_epi16(x, 4)); }
QUIRE_INLINE vi vpick_bytes(vi table, vi at) { return _mm256_shuffle_epi8(table, at); }
QUIRE_INLINE vi vpairs_first(vi low, vi high) { return _mm256_unpacklo_epi8(low, high); }
QUIRE_INLINE vi vpairs_last(vi low, vi high) { return _mm256_unpackhi_epi8(low, high); }
QUIRE_INLINE vi vround_product(vi a, vi b) { return _mm256_mulhrs_epi16(a, b); }
QUIRE_INLINE vi vdot_words(vi sum, vi b, uint32_t x) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(b, vset_int(int(x))));
}
#endif

#if defined(QUIRE_AVX512) || defined(QUIRE_AVX2)
using Words = vi;
struct Entries {
  vi low, high;
};
struct Float8 {
  vi parts;
  Entries factors;
};
// Entries of 16 bits: 16 low bytes, then 16 high ones.
QUIRE_INLINE Entries load_table(const uint8_t* p) { return {repeat16(p), repeat16(p + 16)}; }
QUIRE_INLINE Float8 load_float8_tables() { return {repeat16(kParts), load_table(kFactors)}; }
QUIRE_INLINE Words load_words(const char* p) { return vload_codes(p); }
QUIRE_INLINE void store_words(char* p, Words words) { vstore_codes(p, words); }
// Pair `pair` of four: 16-bit entries for two k of each column.
QUIRE_INLINE Words load_entries(const char* p, int pair, const Entries& table) {
  const vi both = vload_codes(p), codes = pair < 2 ? vnibbles_low(both) : vnibbles_high(both);
  const vi low = vpick_bytes(table.low, codes), high = vpick_bytes(table.high, codes);
  return pair % 2 ? vpairs_last(low, high) : vpairs_first(low, high);
}
// Two k of each column, the first or the last two of four: see word_of.
QUIRE_INLINE Words load_float8(const char* p, int pair, const Float8& tables) {
  const vi codes = vload_codes(p), starts = vnibbles_high(codes), zero = vset_int(0);
  const vi parts = vpick_bytes(tables.parts, vnibbles_low(codes));
  const vi low = vpick_bytes(tables.factors.low, starts);
  const vi high = vpick_bytes(tables.factors.high, starts);
  return pair ? vround_product(vpairs_last(zero, parts), vpairs_last(low, high))
              : vround_product(vpairs_first(zero, parts), vpairs_first(low, high));
}
#else
struct Words {
  int16_t at[8];
};
struct Entries {
  const uint8_t* at;
};
struct Float8 {};
QUIRE_INLINE Entries load_table(const uint8_t* p) { return {p}; }
QUIRE_INLINE Float8 load_float8_tables() { return {}; }
QUIRE_INLINE Words load_float8(const char* p, int pair, const Float8&) {
  Words out;
  for (int i = 0; i < 8; i++) out.at[i] = word_of(static_cast<uint8_t>(p[pair * 8 + i]));
  return out;
}
QUIRE_INLINE Words load_entries(const char* p, int pair, const Entries& table) {
  Words out;
  for (int i = 0; i < 8; i++) {
    const uint8_t both = static_cast<uint8_t>(p[pair % 2 * 8 + i]);
    const int code = pair < 2 ? both & 15 : both >> 4;
    out.at[i] = static_cast<int16_t>(table.at[code] | table.at[16 + code] << 8);
  }
  return out;
}
QUIRE_INLINE Words load_words(const char* p) {
  Words out;
  std::memcpy(out.at, p, sizeof(out.at));
  return out;
}
QUIRE_INLINE void store_words(char* p, const Words& words) {
  std::memcpy(p, words.at, sizeof(words.at));
}
QUIRE_INLINE vi vdot_words(vi sum, const Words& b, uint32_t x) {
  const int32_t first = static_cast<int16_t>(x), second = static_cast<int16_t>(x >> 16);
  for (int i = 0; i < 4; i++) sum[i] += b.at[2 * i] * first + b.at[2 * i + 1] * second;
  return sum;
}
#endif

#ifdef QUIRE_PLANES
// Bytes of entries: the low ones unchanged, the high ones plus 128, so that both are unsigned.
QUIRE_INLINE Entries load_planes(const uint8_t* p) {
  return {repeat16(p), repeat16(p + 16) ^ vset_int(int(0x80808080))};
}
QUIRE_INLINE Nibbles look_up(const Nibbles& codes, vi entries) {
  return {vpick_bytes(entries, codes.low), vpick_bytes(entries, codes.high)};
}
// 256 * high + low
#if defined(QUIRE_AVX512)
QUIRE_INLINE vi vjoin(vi high, vi low) { return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low); }
#else
QUIRE_INLINE vi vjoin(vi high, vi low) { return _mm256_add_epi32(_mm256_slli_epi32(high, 8), low); }
#endif
#endif

// sums of one row += two x at `a` times two vectors of pairs.
QUIRE_INLINE void dot_words(vi (&sums)[2], const Words& b0, const Words& b1, const uint32_t* a) {
#if defined(QUIRE_PAIRS) && defined(QUIRE_AVX2)
  dot_row(sums, b0, b1, a);
#else
  sums[0] = vdot_words(sums[0], b0, *a);
  sums[1] = vdot_words(sums[1], b1, *a);
#endif
}

}  // namespace quire
