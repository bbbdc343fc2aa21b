// Layers with a recurrent state, from the hidden state to what is added to it.
#pragma once

#include "lora.h"
#include "ops.h"
#include "states.h"

namespace quire {

// The kinds of layers, as in kernels/cpu/decoder.py.
enum MixerKind : int32_t {
  kMamba2 = 0,
  kMamba1 = 1,
  kDelta = 2,
  kShortConv = 3,
  kLightning = 4,
  kKimiDelta = 5,
  kRgLru = 6,
  kMixerKinds
};

struct MixerCall {
  const float* x;  // [tokens, hidden]
  float* out;      // [tokens, hidden], may be x
  StateRows of;    // the step's sequences and their blocks
  const int64_t* positions;     // [tokens]
  const int64_t* num_computed;  // [num_seqs], at 0 a state is cleared first; null for none
  LayerAdapters adapters;       // of all tokens
  int threads;
};

// Updates a layer's states with the step's tokens.
int run_mixer(const StateLayer& s, const MixerCall& call);

// out [rows, width] = act<GATE>(gates) * x, with distances between rows; out may be x.
template <int GATE>
void gate_rows(float* out, int64_t out_stride, const float* gates, int64_t gate_stride,
               const float* x, int64_t rows, int64_t width, int threads) {
  deal_ranges(worth(threads, rows * width, 8192), rows, 1, [&](int64_t low, int64_t high) {
    for (int64_t r = low; r < high; r++)
      for_lanes(width, [&](int64_t i, int n) {
        const vf gate = act<GATE>(vload_some(gates + r * gate_stride + i, n));
        vstore_some(out + r * out_stride + i, gate * vload_some(x + r * out_stride + i, n), n);
      });
  });
}

}  // namespace quire
