// Gated activations: act(first half of a row) * second half.
#include "ops.h"

namespace quire {
namespace {

template <int GATE>
QUIRE_INLINE vf gate(vf x) {
  if (GATE == kSilu) return x / (vset(1.0f) + vexp(vset(0.0f) - x));
  if (GATE == kGelu) return vset(0.5f) * x * (vset(1.0f) + verf(x * vset(0.70710678118654752f)));
  const vf inner = x * vfma(x * x, vset(0.044715f * 0.79788456080286536f), vset(0.79788456080286536f));
  return vset(0.5f) * x * (vset(1.0f) + vtanh(inner));
}

template <int GATE, class T>
int run(T* out, const T* x, int64_t rows, int64_t width, int threads) {
  constexpr int64_t kPiece = 2048;
  const int64_t pieces = (width + kPiece - 1) / kPiece;
  const int team = worth(threads, rows * width, 8192);
  deal_ranges(team, rows * pieces, 1, [&](int64_t low, int64_t high) {
    for (int64_t i = low; i < high; i++) {
      const int64_t row = i / pieces, from = i % pieces * kPiece;
      const int64_t count = width - from < kPiece ? width - from : kPiece;
      const T* first = x + row * 2 * width + from;
      T* to = out + row * width + from;
      for_lanes(count, [&](int64_t j, int n) {
        const vf up = vload_some(first + width + j, n);
        vstore_some(to + j, gate<GATE>(vload_some(first + j, n)) * up, n);
      });
    }
  });
  return kOk;
}

template <class T>
int run_kind(T* out, const T* x, int64_t rows, int64_t width, int kind, int threads) {
  if (kind == kSilu) return run<kSilu>(out, x, rows, width, threads);
  if (kind == kGelu) return run<kGelu>(out, x, rows, width, threads);
  return run<kGeluTanh>(out, x, rows, width, threads);
}

}  // namespace

void gate_and_mul(float* out, const float* x, int64_t rows, int64_t width, int kind, int threads) {
  run_kind(out, x, rows, width, kind, threads);
}

}  // namespace quire

using namespace quire;

extern "C" int quire_gate_and_mul(void* out, const void* x, int64_t rows, int64_t width, int kind,
                                  int dtype, int threads) {
  return with_float(dtype, [&](auto* t) {
    auto* to = static_cast<decltype(t)>(out);
    const auto* from = static_cast<decltype(t)>(const_cast<void*>(x));
    return run_kind(to, from, rows, width, kind, threads);
  });
}
