// One float vector of W lanes for each instruction set; kernels are written against this alone.
//
// vmax and vmin of NaN and a number give the second one, in each instruction set: what may be NaN, and
// is to stay so, comes second. To int8 stores round, to the nearest and of two the even one; values
// must lie within -127 to 127.
//
// The build's -march flags choose: 16 lanes with AVX-512, 8 with AVX2, 4 elsewhere (GCC lowers its
// vector extension to SSE2 or NEON). Values stored as bf16, f16 or int8 are float32 in registers.
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
// |x| of at most 127.
template <>
QUIRE_INLINE int8_t from_float<int8_t>(float x) {
  return static_cast<int8_t>(std::nearbyint(x));
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

// Columns of a panel, what all the products work on: two vectors.
constexpr int NR = 2 * W;

// ---- functions in terms of the above ------------------------------------------------------------

// e^x to 2 units in the last place; 0 below -87.33 (and for -inf), so that masked scores vanish;
// from 88 on e^88; NaN of NaN.
QUIRE_INLINE vf vexp(vf x) {
  const vf low = vset(-87.33f);
  const vf clamped = vmin(vset(88.0f), vmax(low, x));  // in this order NaN stays
  // Adding 1.5 * 2^23 leaves a whole number, which stands in the sum's last bits too.
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

// Calls body(i, n) for i = 0, W, 2W, ...: n lanes are in range, n = W but for the last call.
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

// Whether no value is NaN or infinite: maxima overlook NaN.
inline bool all_finite(const float* x, int64_t count) {
  vf off = vset(0.0f);
  for_lanes(count, [&](int64_t i, int n) { off = vfma(vload_some(x + i, n), vset(0.0f), off); });
  return vsum(off) == 0.0f;
}

}  // namespace quire
