// The activations of MLPs: plain, or gated, act(first half of a row) * second half.
#pragma once

#include <type_traits>

#include "abi.h"
#include "vec.h"

namespace quire {

enum Gate : int {
  kSilu = 0,
  kGelu = 1,
  kGeluTanh = 2,
  kRelu = 3,
  kRelu2 = 4,
  kSwigluClamped = 5,  // gated only
  kSigmoid = 6,        // gated only
};

template <int GATE>
QUIRE_INLINE vf act(vf x) {
  if (GATE == kSilu) return x / (vset(1.0f) + vexp(vset(0.0f) - x));
  if (GATE == kGelu) return vset(0.5f) * x * (vset(1.0f) + verf(x * vset(0.70710678118654752f)));
  if (GATE == kRelu) return vmax(vset(0.0f), x);
  if (GATE == kSigmoid) return vset(1.0f) / (vset(1.0f) + vexp(vset(0.0f) - x));
  if (GATE == kRelu2) return vmax(vset(0.0f), x) * vmax(vset(0.0f), x);
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
    const vf limit = vset(how.limit), gate = vmin(limit, x);
    const vf shifted = vmin(limit, vmax(vset(-how.limit), up)) + vset(1.0f);
    return shifted * gate / (vset(1.0f) + vexp(vset(0.0f) - gate * vset(how.alpha)));
  }
};

// Calls f(the kind of activation, as a std::integral_constant).
template <class F>
auto with_gate(int kind, F&& f) {
  switch (kind) {
    case kSilu:
      return f(std::integral_constant<int, kSilu>{});
    case kGelu:
      return f(std::integral_constant<int, kGelu>{});
    case kRelu:
      return f(std::integral_constant<int, kRelu>{});
    case kRelu2:
      return f(std::integral_constant<int, kRelu2>{});
    case kSwigluClamped:
      return f(std::integral_constant<int, kSwigluClamped>{});
    case kSigmoid:
      return f(std::integral_constant<int, kSigmoid>{});
    default:
      return f(std::integral_constant<int, kGeluTanh>{});
  }
}

}  // namespace quire
