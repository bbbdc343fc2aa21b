// 4 lanes in GCC's vector extension: SSE2, NEON, or plain scalar code.
#pragma once

namespace quire {

constexpr int W = 4;
typedef float vf __attribute__((vector_size(16)));

QUIRE_INLINE vf vset(float x) { return vf{x, x, x, x}; }
template <class T>
QUIRE_INLINE vf vload(const T* p) {
  return vf{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
}
QUIRE_INLINE vf vload_even(const uint32_t* p) {
  vf out = vset(0.0f);
  for (int i = 0; i < 4; i++) out[i] = to_float(bf16{static_cast<uint16_t>(p[i])});
  return out;
}
QUIRE_INLINE vf vload_odd(const uint32_t* p) {
  vf out = vset(0.0f);
  for (int i = 0; i < 4; i++) out[i] = to_float(bf16{static_cast<uint16_t>(p[i] >> 16)});
  return out;
}

// out[u] = unit u of W rows, one row per lane; units are the 32 bits from p on, rows `stride`
// values apart.
template <class T>
QUIRE_INLINE void vload_turned(const T* p, int64_t stride, vf (&out)[4]) {
  typedef int32_t vi __attribute__((vector_size(16)));
  vf r[4];
  for (int i = 0; i < 4; i++) std::memcpy(&r[i], p + i * stride, sizeof(vf));
  const vi low = {0, 4, 1, 5}, high = {2, 6, 3, 7}, front = {0, 1, 4, 5}, back = {2, 3, 6, 7};
  const vf a = __builtin_shuffle(r[0], r[1], low), b = __builtin_shuffle(r[0], r[1], high);
  const vf c = __builtin_shuffle(r[2], r[3], low), d = __builtin_shuffle(r[2], r[3], high);
  out[0] = __builtin_shuffle(a, c, front), out[1] = __builtin_shuffle(a, c, back);
  out[2] = __builtin_shuffle(b, d, front), out[3] = __builtin_shuffle(b, d, back);
}
template <class T, int I>
QUIRE_INLINE vf vunit(vf unit) {
  constexpr int kValues = 4 / sizeof(T);
  T values[4 * kValues];
  std::memcpy(values, &unit, sizeof(unit));
  return vf{to_float(values[I]), to_float(values[kValues + I]), to_float(values[2 * kValues + I]),
            to_float(values[3 * kValues + I])};
}

template <class T>
QUIRE_INLINE vf vload_n(const T* p, int n) {
  vf out = vset(0.0f);
  for (int i = 0; i < n; i++) out[i] = to_float(p[i]);
  return out;
}
template <class T>
QUIRE_INLINE void vstore_n(T* p, vf x, int n) {
  for (int i = 0; i < n; i++) p[i] = from_float<T>(x[i]);
}
template <class T>
QUIRE_INLINE void vstore(T* p, vf x) {
  vstore_n(p, x, 4);
}

template <class F>
QUIRE_INLINE vf each(F&& f) {
  return vf{f(0), f(1), f(2), f(3)};
}
QUIRE_INLINE vf vfma(vf a, vf b, vf c) {
#ifdef __FP_FAST_FMAF
  return each([&](int i) { return __builtin_fmaf(a[i], b[i], c[i]); });
#else
  return a * b + c;
#endif
}
QUIRE_INLINE vf vmax(vf a, vf b) {
  return each([&](int i) { return a[i] > b[i] ? a[i] : b[i]; });
}
QUIRE_INLINE vf vmin(vf a, vf b) {
  return each([&](int i) { return a[i] < b[i] ? a[i] : b[i]; });
}
// Adding 1.5 * 2^23 rounds to a whole number; valid for |x| < 2^22, which suffices for vexp.
QUIRE_INLINE vf vround(vf x) {
  const vf magic = vset(12582912.0f);
  return (x + magic) - magic;
}
// x * 2^n for -126 <= n <= 127, where n is also in the last bits of `shifted`.
QUIRE_INLINE vf vscale2(vf x, vf, vf shifted) {
  return each([&](int i) {
    const float last = shifted[i];
    uint32_t bits;
    std::memcpy(&bits, &last, 4);
    bits = (bits + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return x[i] * power;
  });
}
QUIRE_INLINE vf vzero_below(vf x, vf y, vf low) {
  return each([&](int i) { return y[i] < low[i] ? 0.0f : x[i]; });
}
QUIRE_INLINE vf vsqrt(vf x) {
  return each([&](int i) { return __builtin_sqrtf(x[i]); });
}
QUIRE_INLINE vf vabs(vf x) {
  return each([&](int i) { return __builtin_fabsf(x[i]); });
}
QUIRE_INLINE vf vcopysign(vf magnitude, vf sign) {
  return each([&](int i) { return __builtin_copysignf(magnitude[i], sign[i]); });
}
QUIRE_INLINE vf vfill(vf x, int n, float rest) {
  return each([&](int i) { return i < n ? x[i] : rest; });
}
QUIRE_INLINE float vsum(vf x) { return (x[0] + x[2]) + (x[1] + x[3]); }
QUIRE_INLINE float vmaximum(vf x) {
  const float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
  return a > b ? a : b;
}
QUIRE_INLINE void vsum4(vf x0, vf x1, vf x2, vf x3, float* out) {
  out[0] = vsum(x0), out[1] = vsum(x1), out[2] = vsum(x2), out[3] = vsum(x3);
}
QUIRE_INLINE void vtranspose(vf (&r)[4]) {
  for (int i = 0; i < 4; i++) {
    for (int j = i + 1; j < 4; j++) {
      const float t = r[i][j];
      r[i][j] = r[j][i];
      r[j][i] = t;
    }
  }
}

}  // namespace quire
