// 8 lanes with AVX2, FMA and F16C.
#pragma once

namespace quire {

constexpr int W = 8;
using vf = __m256;

QUIRE_INLINE vf vset(float x) { return _mm256_set1_ps(x); }
QUIRE_INLINE vf vload(const float* p) { return _mm256_loadu_ps(p); }
QUIRE_INLINE vf widen_bf16(__m128i x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
QUIRE_INLINE vf vload(const bf16* p) { return widen_bf16(_mm_loadu_si128((const __m128i*)p)); }
QUIRE_INLINE vf vload(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
QUIRE_INLINE vf vload(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
// Words whose low bytes are floats of 8 bits: see to_float.
QUIRE_INLINE vf widen_float8(e5m2, __m128i words) {
  return _mm256_cvtph_ps(_mm_slli_epi16(words, 8));
}
QUIRE_INLINE vf widen_float8(e4m3, __m128i words) {
  const __m128i size = _mm_and_si128(words, _mm_set1_epi16(0x7f));
  const __m128i sign = _mm_slli_epi16(_mm_xor_si128(words, size), 8);
  const __m128i nan = _mm_cmpeq_epi16(size, _mm_set1_epi16(0x7f));
  const __m128i half = _mm_or_si128(_mm_or_si128(sign, _mm_slli_epi16(size, 7)),
                                    _mm_and_si128(nan, _mm_set1_epi16(0x7e00)));
  return _mm256_cvtph_ps(half) * vset(256.0f);
}
template <int MANTISSA>
QUIRE_INLINE vf vload(const float8<MANTISSA>* p) {
  return widen_float8(float8<MANTISSA>{}, _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p)));
}

QUIRE_INLINE vf vload_even(const uint32_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i*)p), 16));
}
QUIRE_INLINE vf vload_odd(const uint32_t* p) {
  // Creating a zero costs nothing, while a mask in a register would take that of a sum.
  __m256i zero;
  asm volatile("vpxor %0, %0, %0" : "=x"(zero));
  return _mm256_castsi256_ps(
      _mm256_blend_epi16(zero, _mm256_loadu_si256((const __m256i*)p), 0xaa));
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
  __m256 r[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    r[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(load(i)), load(i + 4), 1);
  const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(r[0], r[1]));
  const __m256d b = _mm256_castps_pd(_mm256_unpackhi_ps(r[0], r[1]));
  const __m256d c = _mm256_castps_pd(_mm256_unpacklo_ps(r[2], r[3]));
  const __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(r[2], r[3]));
  out[0] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c));
  out[1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c));
  out[2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d));
  out[3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
}
template <class T, int I>
QUIRE_INLINE vf vunit(vf unit) {
  const __m256i bits = _mm256_castps_si256(unit);
  if constexpr (sizeof(T) == 4) {
    return unit;
  } else if constexpr (std::is_same_v<T, bf16>) {
    return I ? _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(-65536)))
             : _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  } else if constexpr (std::is_same_v<T, f16>) {
    const __m256i low =
        I ? _mm256_srli_epi32(bits, 16) : _mm256_and_si256(bits, _mm256_set1_epi32(0xffff));
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(words));
  } else if constexpr (is_float8<T>) {
    const __m256i bytes = _mm256_and_si256(_mm256_srli_epi32(bits, 8 * I), _mm256_set1_epi32(0xff));
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(bytes, bytes), 0x08);
    return widen_float8(T{}, _mm256_castsi256_si128(words));
  } else {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(bits, 24 - 8 * I), 24));
  }
}

QUIRE_INLINE __m256i first(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
QUIRE_INLINE vf vload_n(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
template <class T>
QUIRE_INLINE vf vload_n(const T* p, int n) {
  T whole[8] = {};
  std::memcpy(whole, p, n * sizeof(T));
  return vload(whole);
}

QUIRE_INLINE __m128i narrow_bf16(vf x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i kept = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(kept, kept), 0x08);
  return _mm256_castsi256_si128(packed);
}
QUIRE_INLINE __m128i narrow_f16(vf x) {
  return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
QUIRE_INLINE void vstore(float* p, vf x) { _mm256_storeu_ps(p, x); }
QUIRE_INLINE void vstore(bf16* p, vf x) { _mm_storeu_si128((__m128i*)p, narrow_bf16(x)); }
QUIRE_INLINE void vstore(f16* p, vf x) { _mm_storeu_si128((__m128i*)p, narrow_f16(x)); }
QUIRE_INLINE void vstore(int8_t* p, vf x) {
  const __m256i whole = _mm256_cvtps_epi32(x);
  const __m128i words =
      _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
}
QUIRE_INLINE void vstore(int16_t* p, vf x) {
  const __m256i whole = _mm256_cvtps_epi32(x);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi32(_mm256_castsi256_si128(whole),
                                                _mm256_extracti128_si256(whole, 1)));
}
QUIRE_INLINE void vstore_n(float* p, vf x, int n) { _mm256_maskstore_ps(p, first(n), x); }
template <class T>
QUIRE_INLINE void vstore_n(T* p, vf x, int n) {
  T whole[8];
  vstore(whole, x);
  std::memcpy(p, whole, n * sizeof(T));
}

QUIRE_INLINE vf vfma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
QUIRE_INLINE vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
QUIRE_INLINE vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
QUIRE_INLINE vf vround(vf x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// x * 2^n for -126 <= n <= 127, where n is also in the last bits of `shifted`.
QUIRE_INLINE vf vscale2(vf x, vf, vf shifted) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  return x * _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(127 << 23)));
}
QUIRE_INLINE vf vzero_below(vf x, vf y, vf low) {
  return _mm256_and_ps(_mm256_cmp_ps(y, low, _CMP_NLT_UQ), x);
}
QUIRE_INLINE vf vsqrt(vf x) { return _mm256_sqrt_ps(x); }
QUIRE_INLINE vf vabs(vf x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
QUIRE_INLINE vf vcopysign(vf magnitude, vf sign) {
  const __m256 bit = _mm256_set1_ps(-0.0f);
  return _mm256_or_ps(_mm256_andnot_ps(bit, magnitude), _mm256_and_ps(bit, sign));
}
QUIRE_INLINE vf vfill(vf x, int n, float rest) {
  return _mm256_blendv_ps(_mm256_set1_ps(rest), x, _mm256_castsi256_ps(first(n)));
}
QUIRE_INLINE float vsum(vf x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
QUIRE_INLINE float vmaximum(vf x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

QUIRE_INLINE void vsum4(vf x0, vf x1, vf x2, vf x3, float* out) {
  const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(x0, x1), _mm256_hadd_ps(x2, x3));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}

QUIRE_INLINE void vtranspose(vf (&r)[8]) {
  __m256 t[8];
  for (int i = 0; i < 8; i += 4) {
    const __m256 a = _mm256_unpacklo_ps(r[i], r[i + 1]), b = _mm256_unpackhi_ps(r[i], r[i + 1]);
    const __m256 c = _mm256_unpacklo_ps(r[i + 2], r[i + 3]);
    const __m256 d = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);
    t[i] = _mm256_shuffle_ps(a, c, 0x44);
    t[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
    t[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
    t[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
  }
}

}  // namespace quire
