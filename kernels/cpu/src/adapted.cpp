// Linear layers whose rows have adapters: see lora.h.
#include "lora.h"
#include "ops.h"

namespace quire {
namespace {

// A layer's uses, and whether they are applied during its product.
struct Adapting {
  std::vector<LoraUse> uses;
  LoraCall call;
  bool by_panels;

  int64_t count() const { return static_cast<int64_t>(uses.size()); }

  static Adapting& of(const LayerAdapters& adapters, const LoraLinear* LoraLayer::* slot,
                      const Packed& w, const float* x, int64_t stride, int64_t low, int64_t rows,
                      int threads) {
    thread_local Adapting kept;
    kept.uses.clear();
    if (adapters.count)
      lora_uses(kept.uses, adapters.groups, adapters.count, adapters.layer, slot, low, low + rows);
    kept.by_panels = kept.count() && !w.shard && adds_by_panels(kept.uses.data(), kept.count());
    if (kept.by_panels) kept.call.begin(x, stride, kept.uses.data(), kept.count(), low, threads);
    return kept;
  }
};

int product(Adapting& found, const Packed& w, float* y, const float* x, int64_t stride, int64_t low,
            int64_t rows, int threads) {
  if (found.by_panels) return linear(w, y, x, stride, rows, kF32, threads, &found.call);
  if (!w.shard || !found.count()) {
    const int wrong = linear(w, y, x, stride, rows, kF32, threads);
    if (!wrong && found.count())
      add_lora(y, w.n, x, stride, found.uses.data(), found.count(), low, threads);
    return wrong;
  }
  // Every rank adds to all columns: with gathered outputs each has the whole A and B.
  const int wrong = sharded_linear(w, y, &x, &stride, rows, threads);
  if (!wrong) add_lora(y, w.outputs(), x, stride, found.uses.data(), found.count(), low, threads);
  return wrong;
}

}  // namespace

int adapted_linear(const LayerAdapters& adapters, const LoraLinear* LoraLayer::* slot,
                   const Packed& w, float* y, const float* x, int64_t stride, int64_t low,
                   int64_t rows, int threads) {
  Adapting& found = Adapting::of(adapters, slot, w, x, stride, low, rows, threads);
  return product(found, w, y, x, stride, low, rows, threads);
}

int adapted_gated_linear(const LayerAdapters& adapters, const LoraLinear* LoraLayer::* slot,
                         const Packed& w, float* out, float* gated, const float* x, int64_t width,
                         int64_t low, int64_t rows, const Activation& how, int threads) {
  Adapting& found = Adapting::of(adapters, slot, w, x, w.k, low, rows, threads);
  if (!found.count()) return gated_linear(w, out, gated, x, width, rows, how, threads);
  if (found.by_panels && can_gate(w, rows))
    return linear_gated(w, out, x, w.k, rows, how, threads, &found.call);
  const int wrong = product(found, w, gated, x, w.k, low, rows, threads);
  if (!wrong) gate_and_mul(out, gated, rows, width, how, threads);
  return wrong;
}

}  // namespace quire
