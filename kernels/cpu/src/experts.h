// A mixture of experts: each token is processed by the few that its router chooses.
#pragma once

#include "lora.h"
#include "ops.h"

namespace quire {

// out [rows, hidden] from x of the same shape; they must not overlap. `adapters` refer to rows of
// x.
int run_experts(const Experts& e, float* out, const float* x, int64_t rows,
                const LayerAdapters& adapters, int threads);

}  // namespace quire
