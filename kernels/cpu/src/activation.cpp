// Activations: plain, or gated: act(first half of a row) * second half.
#include "ops.h"

namespace quire {
namespace {

template <int GATE>
QUIRE_INLINE vf act(vf x) {
  if (GATE == kSilu) return x / (vset(1.0f) + vexp(vset(0.0f) - x));
  if (GATE == kGelu) return vset(0.5f) * x * (vset(1.0f) + verf(x * vset(0.70710678118654752f)));
  if (GATE == kRelu) return vmax(x, vset(0.0f));
  if (GATE == kRelu2) return vmax(x, vset(0.0f)) * vmax(x, vset(0.0f));
  const vf cubed = vfma(x * x, vset(0.044715f * 0.79788456080286536f), vset(0.79788456080286536f));
  return vset(0.5f) * x * (vset(1.0f) + vtanh(x * cubed));
}

struct Plain {
  static constexpr int kWidths = 1;
  template <int GATE>
  static QUIRE_INLINE vf of(vf x, vf, const Activation&) {
    return act<GATE>(x);
  }
};

struct Gated {
  static constexpr int kWidths = 2;
  template <int GATE>
  static QUIRE_INLINE vf of(vf x, vf up, const Activation& how) {
    if (GATE != kSwigluClamped) return act<GATE>(x) * up;
    const vf limit = vset(how.limit), gate = vmin(x, limit);
    const vf shifted = vmin(vmax(up, vset(-how.limit)), limit) + vset(1.0f);
    return shifted * gate / (vset(1.0f) + vexp(vset(0.0f) - gate * vset(how.alpha)));
  }
};

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
  switch (how.kind) {
    case kSilu:
      return run<How, kSilu>(out, x, rows, width, how, threads);
    case kGelu:
      return run<How, kGelu>(out, x, rows, width, how, threads);
    case kRelu:
      return run<How, kRelu>(out, x, rows, width, how, threads);
    case kRelu2:
      return run<How, kRelu2>(out, x, rows, width, how, threads);
    case kSwigluClamped:
      return run<How, kSwigluClamped>(out, x, rows, width, how, threads);
    default:
      return run<How, kGeluTanh>(out, x, rows, width, how, threads);
  }
}

}  // namespace

void gate_and_mul(float* out, const float* x, int64_t rows, int64_t width, const Activation& how,
                  int threads) {
  run_kind<Gated>(out, x, rows, width, how, threads);
}

void activate(float* out, const float* x, int64_t rows, int64_t width, const Activation& how,
              int threads) {
  run_kind<Plain>(out, x, rows, width, how, threads);
}

}  // namespace quire

using namespace quire;

extern "C" int quire_gate_and_mul(void* out, const void* x, int64_t rows, int64_t width, int kind,
                                  int dtype, int threads) {
  return with_float(dtype, [&](auto* t) {
    auto* to = static_cast<decltype(t)>(out);
    const auto* from = static_cast<decltype(t)>(const_cast<void*>(x));
    return run_kind<Gated>(to, from, rows, width, Activation{kind, 0, 0}, threads);
  });
}
