// A mixture of experts: each token goes through the few that its router chooses.
#pragma once

#include "lora.h"
#include "ops.h"

namespace quire {

struct Experts {
  int64_t hidden, count, top_k, inner, shared_inner;
  int64_t groups, top_groups;     // of experts that lie side by side, and those a token may go to
  int64_t group_best;             // 1 or 2: so many of a group's scores are what it is chosen by
  const Packed* router;           // [count, hidden]
  const Packed* const* gate_up;   // [count] of [2 inner, hidden]
  const Packed* const* down;      // [count] of [hidden, inner]
  const Packed *shared_gate_up, *shared_down;  // the expert of all tokens, or null
  const Packed* shared_gate;      // its sigmoid [1, hidden], or null
  const float* choice_bias;       // [count], added to what experts are chosen by, or null
  int32_t softmax_first;          // softmax over all experts, then choose; or over the chosen ones
  int32_t sigmoid;                // of each score, in the place of the softmax over all
  int32_t renormalize;            // then divide by the sum of the chosen ones'
  float scale;                    // of the chosen ones' weights
  Activation act;
};

// out [rows, hidden] from x of the same, which it must not be. `adapters` name rows of x.
int run_experts(const Experts& e, float* out, const float* x, int64_t rows,
                const LayerAdapters& adapters, int threads);

}  // namespace quire
