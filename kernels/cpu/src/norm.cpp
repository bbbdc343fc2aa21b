// RMS norm and LayerNorm, alone and fused with the residual add.
#include "ops.h"

namespace quire {
namespace {

// 1 / rms of a row whose values `next(i, lanes)` returns. Four sums hide the adds' latency; their
// order is fixed, so a row's result doesn't depend on the batch.
template <class F>
float inverse_rms(int64_t width, float eps, F&& next) {
  vf sums[4] = {vset(0), vset(0), vset(0), vset(0)};
  int64_t i = 0;
  for (; i + 4 * W <= width; i += 4 * W) {
    for (int j = 0; j < 4; j++) {
      const vf x = next(i + j * W, W);
      sums[j] = vfma(x, x, sums[j]);
    }
  }
  for (; i < width; i += W) {
    const vf x = next(i, static_cast<int>(width - i < W ? width - i : W));
    sums[0] = vfma(x, x, sums[0]);
  }
  const float total = vsum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  return 1.0f / std::sqrt(total / static_cast<float>(width) + eps);
}

template <class T, class G>
void scale_row(T* out, const T* x, const G* weight, int64_t width, float inverse) {
  const vf scale = vset(inverse);
  for_lanes(width, [&](int64_t i, int n) {
    vstore_some(out + i, vload_some(x + i, n) * scale * vload_some(weight + i, n), n);
  });
}

template <class T, class G>
void norm_row(T* out, const T* x, const G* weight, int64_t width, float eps) {
  const float inverse =
      inverse_rms(width, eps, [&](int64_t i, int n) { return vload_some(x + i, n); });
  scale_row(out, x, weight, width, inverse);
}

// The sum is rounded to T before it is normed, as if it had been stored and loaded.
template <class T, class G>
void add_norm_row(T* out, const T* x, T* residual, const G* weight, int64_t width, float eps) {
  const float inverse = inverse_rms(width, eps, [&](int64_t i, int n) {
    vstore_some(residual + i, vload_some(residual + i, n) + vload_some(x + i, n), n);
    return vload_some(residual + i, n);
  });
  scale_row(out, residual, weight, width, inverse);
}

// out = (x - mean) / deviation * weight + bias, which may both be null.
void layer_norm_to(float* out, const float* x, const float* weight, const float* bias,
                   int64_t width, float eps) {
  vf sums = vset(0.0f);
  for_lanes(width, [&](int64_t i, int n) { sums = sums + vload_some(x + i, n); });
  const vf mean = vset(vsum(sums) / static_cast<float>(width));
  vf squares = vset(0.0f);
  for_lanes(width, [&](int64_t i, int n) {
    const vf off = vload_some(x + i, n) - mean;
    squares = vfma(off, n == W ? off : vfill(off, n, 0.0f), squares);
  });
  const vf scale = vset(1.0f / std::sqrt(vsum(squares) / static_cast<float>(width) + eps));
  for_lanes(width, [&](int64_t i, int n) {
    vf y = (vload_some(x + i, n) - mean) * scale;
    if (weight) y = y * vload_some(weight + i, n);
    if (bias) y = y + vload_some(bias + i, n);
    vstore_some(out + i, y, n);
  });
}

template <class F>
int over_rows(int threads, int64_t rows, int64_t width, F&& body) {
  const int team = worth(threads, rows * width, 16384);
  deal_ranges(team, rows, 1 + 4096 / width, [&](int64_t low, int64_t high) {
    for (int64_t row = low; row < high; row++) body(row * width);
  });
  return kOk;
}

// Calls f(T*, G*) for activations of `dtype` and weights of the same or of float32.
template <class F>
int with_weight(int dtype, int weight_dtype, F&& f) {
  return with_float(dtype, [&](auto* x) -> int {
    if (weight_dtype == dtype) return f(x, x);
    if (weight_dtype == kF32) return f(x, static_cast<float*>(nullptr));
    return kBadDType;
  });
}

}  // namespace

void rms_norm(float* out, const float* x, const float* weight, int64_t rows, int64_t width,
              float eps, int threads) {
  over_rows(threads, rows, width,
            [&](int64_t at) { norm_row(out + at, x + at, weight, width, eps); });
}

void add_rms_norm(float* out, const float* x, float* residual, const float* weight, int64_t rows,
                  int64_t width, float eps, int threads) {
  over_rows(threads, rows, width, [&](int64_t at) {
    add_norm_row(out + at, x + at, residual + at, weight, width, eps);
  });
}

void layer_norm_row(float* x, const float* weight, const float* bias, int64_t width, float eps) {
  layer_norm_to(x, x, weight, bias, width, eps);
}

void norm(const Norm& n, float* out, const float* x, int64_t rows, int64_t width, float eps,
          int threads) {
  over_rows(threads, rows, width, [&](int64_t at) {
    if (n.kind == kRms) norm_row(out + at, x + at, n.weight, width, eps);
    if (n.kind == kLayer) layer_norm_to(out + at, x + at, n.weight, n.bias, width, eps);
    if (n.kind == kNoNorm && out != x) std::memcpy(out + at, x + at, width * sizeof(float));
  });
}

void add_norm(const Norm& n, float* out, const float* x, float* residual, int64_t rows,
              int64_t width, float eps, int threads) {
  if (n.kind == kRms) return add_rms_norm(out, x, residual, n.weight, rows, width, eps, threads);
  over_rows(threads, rows, width, [&](int64_t at) {
    for_lanes(width, [&](int64_t i, int lanes) {
      const vf sum = vload_some(residual + at + i, lanes) + vload_some(x + at + i, lanes);
      vstore_some(residual + at + i, sum, lanes);
    });
    if (n.kind == kLayer) layer_norm_to(out + at, residual + at, n.weight, n.bias, width, eps);
    if (n.kind == kNoNorm) std::memcpy(out + at, residual + at, width * sizeof(float));
  });
}

}  // namespace quire

extern "C" int quire_rms_norm(void* out, const void* x, const void* weight, int64_t rows,
                              int64_t width, float eps, int dtype, int weight_dtype, int threads) {
  return with_weight(dtype, weight_dtype, [&](auto* t, auto* g) {
    auto* to = static_cast<decltype(t)>(out);
    const auto* from = static_cast<decltype(t)>(const_cast<void*>(x));
    const auto* scale = static_cast<decltype(g)>(const_cast<void*>(weight));
    return over_rows(threads, rows, width,
                     [&](int64_t at) { norm_row(to + at, from + at, scale, width, eps); });
  });
}

extern "C" int quire_add_rms_norm(void* out, const void* x, void* residual, const void* weight,
                                  int64_t rows, int64_t width, float eps, int dtype,
                                  int weight_dtype, int threads) {
  return with_weight(dtype, weight_dtype, [&](auto* t, auto* g) {
    auto* to = static_cast<decltype(t)>(out);
    const auto* from = static_cast<decltype(t)>(const_cast<void*>(x));
    auto* sum = static_cast<decltype(t)>(residual);
    const auto* scale = static_cast<decltype(g)>(const_cast<void*>(weight));
    return over_rows(threads, rows, width, [&](int64_t at) {
      add_norm_row(to + at, from + at, sum + at, scale, width, eps);
    });
  });
}
