// A float vector of W lanes for each instruction set; kernels use only this interface.
//
// vmax and vmin of NaN and a number return the second operand, in each instruction set, so a value
// whose NaN must survive comes second. Stores to int8 round to nearest even; values must be within
// -127 to 127.
//
// The build's -march flags choose: 16 lanes with AVX-512, 8 with AVX2, 4 elsewhere (GCC lowers its
// vector extension to SSE2 or NEON). Values stored as bf16, f16, int8 or 8-bit floats are float32
// in registers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define QUIRE_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define QUIRE_AVX2 1
#endif
#if defined(QUIRE_AVX512) || defined(QUIRE_AVX2)
#include <immintrin.h>
#endif

#define QUIRE_INLINE inline __attribute__((always_inline))

namespace quire {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};
// Floats of 8 bits: a sign, an exponent, MANTISSA bits. e4m3 is the finite variant, up to 448,
// whose NaN has all bits set; e5m2 is the upper byte of float16.
template <int MANTISSA>
struct float8 {
  uint8_t bits;
};
using e4m3 = float8<3>;
using e5m2 = float8<2>;
template <class T>
constexpr bool is_float8 = std::is_same_v<T, e4m3> || std::is_same_v<T, e5m2>;

// ---- single values -----------------------------------------------------------------------------

QUIRE_INLINE float to_float(float x) { return x; }
QUIRE_INLINE float to_float(int8_t x) { return static_cast<float>(x); }
QUIRE_INLINE float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
QUIRE_INLINE float to_float(f16 x) {
  _Float16 half;
  std::memcpy(&half, &x.bits, 2);
  return static_cast<float>(half);
}

QUIRE_INLINE float to_float(e5m2 x) { return to_float(f16{static_cast<uint16_t>(x.bits << 8)}); }
// The shifted bits of e4m3 are a float16 that is 2^8 times too small.
QUIRE_INLINE float to_float(e4m3 x) {
  const uint16_t size = x.bits & 0x7f, sign = x.bits & 0x80;
  if (size == 0x7f) return NAN;
  return to_float(f16{static_cast<uint16_t>(sign << 8 | size << 7)}) * 256.0f;
}

template <class T>
T from_float(float x);
template <>
QUIRE_INLINE float from_float<float>(float x) {
  return x;
}
template <>
QUIRE_INLINE f16 from_float<f16>(float x) {
  const _Float16 half = static_cast<_Float16>(x);
  f16 out;
  std::memcpy(&out.bits, &half, 2);
  return out;
}
// |x| must be at most 127.
template <>
QUIRE_INLINE int8_t from_float<int8_t>(float x) {
  return static_cast<int8_t>(std::nearbyint(x));
}
// Rounds to nearest even; values that are too large become the largest one.
template <int MANTISSA>
QUIRE_INLINE float8<MANTISSA> to_float8(float x) {
  constexpr int kDropped = 23 - MANTISSA, kLowest = MANTISSA == 3 ? -6 : -14;
  const float size = std::fmin(std::fabs(x), MANTISSA == 3 ? 448.0f : 57344.0f);
  uint32_t bits, sign;
  std::memcpy(&bits, &size, 4);
  std::memcpy(&sign, &x, 4);
  uint32_t code = (bits + (1u << (kDropped - 1)) - 1 + (bits >> kDropped & 1)) >> kDropped;
  code -= (127 + kLowest - 1) << MANTISSA;
  // Below 2^kLowest the step is fixed, and the first normal code follows the last subnormal one.
  if (size < std::ldexp(1.0f, kLowest)) {
    code = static_cast<uint32_t>(std::nearbyint(size * std::ldexp(1.0f, MANTISSA - kLowest)));
  }
  if (std::isnan(x)) code = 0x7f;
  return {static_cast<uint8_t>(code | (sign >> 24 & 0x80))};
}
template <>
QUIRE_INLINE e4m3 from_float<e4m3>(float x) {
  return to_float8<3>(x);
}
template <>
QUIRE_INLINE e5m2 from_float<e5m2>(float x) {
  return to_float8<2>(x);
}
template <>
QUIRE_INLINE int16_t from_float<int16_t>(float x) {
  return static_cast<int16_t>(std::nearbyint(x));
}
template <>
QUIRE_INLINE bf16 from_float<bf16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
  bits += 0x7fffu + ((bits >> 16) & 1);
  return {static_cast<uint16_t>(bits >> 16)};
}

}  // namespace quire

#if defined(QUIRE_AVX512)
#include "vec_avx512.h"
#elif defined(QUIRE_AVX2)
#include "vec_avx2.h"
#else
#include "vec_generic.h"
#endif

namespace quire {

// Columns of a panel for all products: two vectors.
constexpr int NR = 2 * W;

// ---- functions in terms of the above ------------------------------------------------------------

// e^x to 2 units in the last place; 0 below -87.33 (and for -inf), so that masked scores vanish;
// e^88 from 88 on; NaN for NaN.
QUIRE_INLINE vf vexp(vf x) {
  const vf low = vset(-87.33f);
  const vf clamped = vmin(vset(88.0f), vmax(low, x));  // this order preserves NaN
  // Adding 1.5 * 2^23 rounds to a whole number, which is also in the sum's last bits.
  const vf magic = vset(12582912.0f);
  const vf shifted = vfma(clamped, vset(1.44269504088896341f), magic);
  const vf n = shifted - magic;
  vf r = vfma(n, vset(-0.693359375f), clamped);
  r = vfma(n, vset(2.12194440e-4f), r);
  vf p = vset(1.9875691500e-4f);
  p = vfma(p, r, vset(1.3981999507e-3f));
  p = vfma(p, r, vset(8.3334519073e-3f));
  p = vfma(p, r, vset(4.1665795894e-2f));
  p = vfma(p, r, vset(1.6666665459e-1f));
  p = vfma(p, r, vset(5.0000001201e-1f));
  p = vfma(p, r * r, r) + vset(1.0f);
  return vzero_below(vscale2(p, n, shifted), x, low);
}

QUIRE_INLINE vf vtanh(vf x) {
  const vf e = vexp(x + x);
  return vset(1.0f) - vset(2.0f) / (e + vset(1.0f));
}

// Abramowitz and Stegun 7.1.26: within 1.5e-7.
QUIRE_INLINE vf verf(vf x) {
  const vf a = vabs(x);
  const vf t = vset(1.0f) / vfma(a, vset(0.3275911f), vset(1.0f));
  vf p = vset(1.061405429f);
  p = vfma(p, t, vset(-1.453152027f));
  p = vfma(p, t, vset(1.421413741f));
  p = vfma(p, t, vset(-0.284496736f));
  p = vfma(p, t, vset(0.254829592f));
  return vcopysign(vset(1.0f) - p * t * vexp(vset(0.0f) - x * x), x);
}

// Calls body(i, n) for i = 0, W, 2W, ...: n lanes are in range, n = W except in the last call.
template <class F>
QUIRE_INLINE void for_lanes(int64_t count, F&& body) {
  int64_t i = 0;
  for (; i + W <= count; i += W) body(i, W);
  if (i < count) body(i, static_cast<int>(count - i));
}

template <class T>
QUIRE_INLINE vf vload_some(const T* p, int n) {
  return n == W ? vload(p) : vload_n(p, n);
}
template <class T>
QUIRE_INLINE void vstore_some(T* p, vf x, int n) {
  if (n == W) {
    vstore(p, x);
  } else {
    vstore_n(p, x, n);
  }
}

// Whether no value is NaN or infinite: maxima ignore NaN.
inline bool all_finite(const float* x, int64_t count) {
  vf off = vset(0.0f);
  for_lanes(count, [&](int64_t i, int n) { off = vfma(vload_some(x + i, n), vset(0.0f), off); });
  return vsum(off) == 0.0f;
}

}  // namespace quire
