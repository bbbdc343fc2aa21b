// Layers that carry a state from token to token: kernels/ssm.py says what they compute.
#pragma once

#include "runtime.h"

namespace quire {

// Whose tokens a call is about: sequence i has tokens [starts[i], starts[i + 1]) and state rows[i].
struct StateRows {
  const int32_t* starts;
  const int64_t* rows;
  int64_t num_seqs, tokens, num_rows;
};

struct CausalConv {
  float* out;      // [tokens, channels]
  const float* x;  // `stride` elements from token to token
  int64_t stride, channels, width;
  float* states;  // [num_rows, width - 1, channels]: each sequence's last inputs
  const float *weight, *bias;  // [width, channels], [channels] or null
  StateRows of;
};

struct LinearScan {
  float* out;  // [tokens, heads, value_size]
  const float *q, *k, *v, *rate, *beta;  // beta null: the rate takes its place
  int64_t q_stride, k_stride, v_stride, rate_stride, beta_stride;  // from token to token
  const float *decay, *rate_bias, *skip;  // [heads]; skip may be null
  float* states;  // [num_rows, heads, value_size, key_size]
  int64_t heads, key_heads, value_size, key_size;
  float least_rate, most_rate;
  int32_t delta;
  StateRows of;
};

int causal_conv(const CausalConv& c, int threads);
int linear_scan(const LinearScan& s, int threads);

}  // namespace quire
