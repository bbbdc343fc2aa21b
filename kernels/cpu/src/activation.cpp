// Activations: plain, or gated: act(first half of a row) * second half.
#include "ops.h"

namespace quire {
namespace {

template <class How, int GATE, class T>
int run(T* out, const T* x, int64_t rows, int64_t width, const Activation& how, int threads) {
  constexpr int64_t kPiece = 2048;
  const int64_t pieces = (width + kPiece - 1) / kPiece, second = (How::kWidths - 1) * width;
  const int team = worth(threads, rows * width, 8192);
  deal_ranges(team, rows * pieces, 1, [&](int64_t low, int64_t high) {
    for (int64_t i = low; i < high; i++) {
      const int64_t row = i / pieces, from = i % pieces * kPiece;
      const int64_t count = width - from < kPiece ? width - from : kPiece;
      const T* first = x + row * How::kWidths * width + from;
      T* to = out + row * width + from;
      for_lanes(count, [&](int64_t j, int n) {
        const vf up = vload_some(first + second + j, n);
        vstore_some(to + j, How::template of<GATE>(vload_some(first + j, n), up, how), n);
      });
    }
  });
  return kOk;
}

template <class How, class T>
int run_kind(T* out, const T* x, int64_t rows, int64_t width, const Activation& how,
             int threads) {
  return with_gate(how.kind, [&](auto kind) {
    return run<How, decltype(kind)::value>(out, x, rows, width, how, threads);
  });
}

}  // namespace

void gate_and_mul(float* out, const float* x, int64_t rows, int64_t width, const Activation& how,
                  int threads) {
  run_kind<Gated>(out, x, rows, width, how, threads);
}

int gated_linear(const Packed& w, float* out, float* gated, const float* x, int64_t width,
                 int64_t rows, const Activation& how, int threads) {
  if (can_gate(w, rows)) return linear_gated(w, out, x, w.k, rows, how, threads);
  const int wrong = linear(w, gated, x, w.k, rows, kF32, threads);
  if (!wrong) gate_and_mul(out, gated, rows, width, how, threads);
  return wrong;
}

int run_mlp(const Mlp& w, float* out, const float* x, int64_t rows, float* inner, float* gated,
            int threads) {
  int wrong;
  if (w.gated) {
    wrong = gated_linear(*w.gate_up, inner, gated, x, w.inner, rows, w.act, threads);
  } else {
    wrong = linear(*w.gate_up, inner, x, w.gate_up->k, rows, kF32, threads);
    activate(inner, inner, rows, w.inner, w.act, threads);
  }
  return wrong ? wrong : linear(*w.down, out, inner, w.inner, rows, kF32, threads);
}

void activate(float* out, const float* x, int64_t rows, int64_t width, const Activation& how,
              int threads) {
  run_kind<Plain>(out, x, rows, width, how, threads);
}

}  // namespace quire

namespace {

template <class How>
int run_any(void* out, const void* x, int64_t rows, int64_t width, int kind, int dtype,
            int threads) {
  return with_float(dtype, [&](auto* t) {
    auto* to = static_cast<decltype(t)>(out);
    const auto* from = static_cast<decltype(t)>(const_cast<void*>(x));
    return run_kind<How>(to, from, rows, width, Activation{kind, 0, 0}, threads);
  });
}

}  // namespace

extern "C" int quire_gate_and_mul(void* out, const void* x, int64_t rows, int64_t width, int kind,
                                  int dtype, int threads) {
  return run_any<Gated>(out, x, rows, width, kind, dtype, threads);
}

extern "C" int quire_activate(void* out, const void* x, int64_t rows, int64_t width, int kind,
                              int dtype, int threads) {
  return run_any<Plain>(out, x, rows, width, kind, dtype, threads);
}
