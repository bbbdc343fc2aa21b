// 16 lanes with AVX-512 (F, BW, VL, DQ).
#pragma once

namespace quire {

constexpr int W = 16;
using vf = __m512;

QUIRE_INLINE vf vset(float x) { return _mm512_set1_ps(x); }
QUIRE_INLINE vf vload(const float* p) { return _mm512_loadu_ps(p); }
QUIRE_INLINE vf widen_bf16(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
QUIRE_INLINE vf vload(const bf16* p) { return widen_bf16(_mm256_loadu_si256((const __m256i*)p)); }
QUIRE_INLINE vf vload(const f16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
QUIRE_INLINE vf vload(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}

// Words whose low bytes are floats of 8 bits: see to_float.
QUIRE_INLINE vf widen_float8(e5m2, __m256i words) {
  return _mm512_cvtph_ps(_mm256_slli_epi16(words, 8));
}
QUIRE_INLINE vf widen_float8(e4m3, __m256i words) {
  const __m256i size = _mm256_and_si256(words, _mm256_set1_epi16(0x7f));
  const __m256i sign = _mm256_slli_epi16(_mm256_xor_si256(words, size), 8);
  const __m256i nan = _mm256_cmpeq_epi16(size, _mm256_set1_epi16(0x7f));
  const __m256i half = _mm256_or_si256(_mm256_or_si256(sign, _mm256_slli_epi16(size, 7)),
                                       _mm256_and_si256(nan, _mm256_set1_epi16(0x7e00)));
  return _mm512_cvtph_ps(half) * vset(256.0f);
}
template <int MANTISSA>
QUIRE_INLINE vf vload(const float8<MANTISSA>* p) {
  return widen_float8(float8<MANTISSA>{}, _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)));
}

// Lane i gets the first or the second value of the i-th pair of bf16.
QUIRE_INLINE vf vload_even(const uint32_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
}
QUIRE_INLINE vf vload_odd(const uint32_t* p) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(-65536)));
}

// out[u] = unit u of W rows, one row per lane; units are the 32 bits from p on, rows `stride`
// values apart.
template <class T>
QUIRE_INLINE void vload_turned(const T* p, int64_t stride, vf (&out)[4]) {
  const int64_t row = stride * static_cast<int64_t>(sizeof(T));
  const char* from = reinterpret_cast<const char*>(p);
  const auto load = [&](int i) __attribute__((always_inline)) {
    return _mm_loadu_ps(reinterpret_cast<const float*>(from + i * row));
  };
  const auto both = [&](int i) __attribute__((always_inline)) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(load(i)), load(i + 4), 1);
  };
  __m512 r[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    r[i] = _mm512_insertf32x8(_mm512_castps256_ps512(both(i)), both(i + 8), 1);
  const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(r[0], r[1]));
  const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(r[0], r[1]));
  const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(r[2], r[3]));
  const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(r[2], r[3]));
  out[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
  out[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
  out[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
  out[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
}
// Value I of each unit, which contains several values of T.
template <class T, int I>
QUIRE_INLINE vf vunit(vf unit) {
  const __m512i bits = _mm512_castps_si512(unit);
  if constexpr (sizeof(T) == 4) {
    return unit;
  } else if constexpr (std::is_same_v<T, bf16>) {
    return _mm512_castsi512_ps(I ? _mm512_and_si512(bits, _mm512_set1_epi32(-65536))
                                 : _mm512_slli_epi32(bits, 16));
  } else if constexpr (std::is_same_v<T, f16>) {
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(I ? _mm512_srli_epi32(bits, 16) : bits));
  } else if constexpr (is_float8<T>) {
    const __m512i bytes = _mm512_and_si512(_mm512_srli_epi32(bits, 8 * I), _mm512_set1_epi32(0xff));
    return widen_float8(T{}, _mm512_cvtepi32_epi16(bytes));
  } else {
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(bits, 24 - 8 * I), 24));
  }
}

QUIRE_INLINE __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }
QUIRE_INLINE vf vload_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
QUIRE_INLINE vf vload_n(const bf16* p, int n) {
  return widen_bf16(_mm256_maskz_loadu_epi16(first(n), p));
}
QUIRE_INLINE vf vload_n(const f16* p, int n) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p));
}
QUIRE_INLINE vf vload_n(const int8_t* p, int n) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first(n), p)));
}
template <int MANTISSA>
QUIRE_INLINE vf vload_n(const float8<MANTISSA>* p, int n) {
  return widen_float8(float8<MANTISSA>{}, _mm256_cvtepu8_epi16(_mm_maskz_loadu_epi8(first(n), p)));
}

QUIRE_INLINE __m256i narrow_bf16(vf x) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i kept = _mm512_mask_mov_epi32(
      rounded, nan, _mm512_or_si512(bits, _mm512_set1_epi32(0x400000)));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
#endif
}
QUIRE_INLINE __m256i narrow_f16(vf x) {
  return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
QUIRE_INLINE void vstore(float* p, vf x) { _mm512_storeu_ps(p, x); }
QUIRE_INLINE void vstore(bf16* p, vf x) { _mm256_storeu_si256((__m256i*)p, narrow_bf16(x)); }
QUIRE_INLINE void vstore(f16* p, vf x) { _mm256_storeu_si256((__m256i*)p, narrow_f16(x)); }
QUIRE_INLINE void vstore(int8_t* p, vf x) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}
QUIRE_INLINE void vstore(int16_t* p, vf x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x)));
}
QUIRE_INLINE void vstore_n(int8_t* p, vf x, int n) {
  _mm512_mask_cvtsepi32_storeu_epi8(p, first(n), _mm512_cvtps_epi32(x));
}
QUIRE_INLINE void vstore_n(float* p, vf x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
QUIRE_INLINE void vstore_n(bf16* p, vf x, int n) {
  _mm256_mask_storeu_epi16(p, first(n), narrow_bf16(x));
}
QUIRE_INLINE void vstore_n(f16* p, vf x, int n) {
  _mm256_mask_storeu_epi16(p, first(n), narrow_f16(x));
}

QUIRE_INLINE vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
#ifdef __AVX512BF16__
#define QUIRE_BF16_DOT 1
// Adds to each lane of `sum` the products of a pair of bf16.
QUIRE_INLINE void add_pairs(vf& sum, __m512i x, __m512i b) {
  // With the intrinsic, GCC adds two copies of its sum around each of these.
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(b));
}
// Lane i: the pair of first[i] and second[i], which must be exact in bf16.
QUIRE_INLINE vf vpair(vf first, vf second) {
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(first), 16);
  return _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_castps_si512(second)));
}
#endif
QUIRE_INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
QUIRE_INLINE vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
QUIRE_INLINE vf vround(vf x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// x * 2^n; other variants find n in the last bits of `shifted`.
QUIRE_INLINE vf vscale2(vf x, vf n, vf) { return _mm512_scalef_ps(x, n); }
QUIRE_INLINE vf vzero_below(vf x, vf y, vf low) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(y, low, _CMP_NLT_UQ), x);
}
QUIRE_INLINE vf vsqrt(vf x) { return _mm512_sqrt_ps(x); }
QUIRE_INLINE vf vabs(vf x) { return _mm512_abs_ps(x); }
QUIRE_INLINE vf vcopysign(vf magnitude, vf sign) {
  const __m512 bit = _mm512_set1_ps(-0.0f);
  return _mm512_or_ps(_mm512_andnot_ps(bit, magnitude), _mm512_and_ps(bit, sign));
}
// x with `rest` in the lanes from n on.
QUIRE_INLINE vf vfill(vf x, int n, float rest) {
  return _mm512_mask_mov_ps(_mm512_set1_ps(rest), first(n), x);
}
QUIRE_INLINE float vsum(vf x) { return _mm512_reduce_add_ps(x); }
QUIRE_INLINE float vmaximum(vf x) { return _mm512_reduce_max_ps(x); }

// out[i] = sum of the lanes of x[i].
QUIRE_INLINE void vsum4(vf x0, vf x1, vf x2, vf x3, float* out) {
  auto half = [](vf x) {
    return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  };
  const __m256 pair0 = _mm256_hadd_ps(half(x0), half(x1));
  const __m256 pair1 = _mm256_hadd_ps(half(x2), half(x3));
  const __m256 all = _mm256_hadd_ps(pair0, pair1);
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}

// Lane i = sum of the lanes of x[i].
QUIRE_INLINE vf vsum16(const vf (&x)[16]) {
  __m512 pair[8], four[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
    pair[i] = _mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]) +
              _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512d a = _mm512_castps_pd(pair[2 * i]), b = _mm512_castps_pd(pair[2 * i + 1]);
    four[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)) +
              _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
  }
  auto halves = [](__m512 a, __m512 b) {
    return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
  };
  return halves(halves(four[0], four[1]), halves(four[2], four[3]));
}

// rows[i] lane j <- rows[j] lane i.
QUIRE_INLINE void vtranspose(vf (&r)[16]) {
  __m512 t[16];
  for (int i = 0; i < 16; i += 4) {
    const __m512 a = _mm512_unpacklo_ps(r[i], r[i + 1]), b = _mm512_unpackhi_ps(r[i], r[i + 1]);
    const __m512 c = _mm512_unpacklo_ps(r[i + 2], r[i + 3]);
    const __m512 d = _mm512_unpackhi_ps(r[i + 2], r[i + 3]);
    t[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(c)));
    t[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(c)));
    t[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(b), _mm512_castps_pd(d)));
    t[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(b), _mm512_castps_pd(d)));
  }
  for (int i = 0; i < 4; i++) {
    const __m512 a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88);
    const __m512 b = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd);
    const __m512 c = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88);
    const __m512 d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xdd);
    r[i] = _mm512_shuffle_f32x4(a, c, 0x88);
    r[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
    r[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
    r[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
}

}  // namespace quire
