// Layers with a recurrent state: kernels/ssm.py defines what they compute.
#pragma once

#include "runtime.h"

namespace quire {

int causal_conv(const CausalConv& c, int threads);
int linear_scan(const LinearScan& s, int threads);
int diagonal_scan(const DiagonalScan& s, int threads);
void lru_inputs(const LruInputs& l, int threads);

}  // namespace quire
