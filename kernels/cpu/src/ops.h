// The operations of a decoder, like those of the C interface but in float32.
#pragma once

#include "attention.h"
#include "gate.h"
#include "linear.h"
#include "runtime.h"

namespace quire {

enum NormKind : int64_t { kRms = 0, kLayer = 1, kNoNorm = 2 };

// out = norm(x) * weight. add_rms_norm first adds x to `residual`, and norms the sum.
void rms_norm(float* out, const float* x, const float* weight, int64_t rows, int64_t width,
              float eps, int threads);
void add_rms_norm(float* out, const float* x, float* residual, const float* weight, int64_t rows,
                  int64_t width, float eps, int threads);

// The same for any kind of norm; kNoNorm copies.
void norm(const Norm& n, float* out, const float* x, int64_t rows, int64_t width, float eps,
          int threads);
void add_norm(const Norm& n, float* out, const float* x, float* residual, int64_t rows,
              int64_t width, float eps, int threads);
// LayerNorm of one row in place.
void layer_norm_row(float* x, const float* weight, const float* bias, int64_t width, float eps);

// out [rows, width] = gate(x[:, :width]) * x[:, width:].
void gate_and_mul(float* out, const float* x, int64_t rows, int64_t width, const Activation& how,
                  int threads);
// The same of x W^T + b, in one call if possible; otherwise `gated` [rows, 2 width] is the buffer
// in between.
int gated_linear(const Packed& w, float* out, float* gated, const float* x, int64_t width,
                 int64_t rows, const Activation& how, int threads);
// Two products with an activation between them.
struct Mlp {
  const Packed *gate_up, *down;  // [inner or, gated, 2 inner; hidden], [hidden, inner]
  int64_t inner;
  int32_t gated;
  Activation act;
};

// out [rows, hidden], which may be x; inner [rows, w.inner] and gated [rows, 2 w.inner] are
// buffers.
int run_mlp(const Mlp& w, float* out, const float* x, int64_t rows, float* inner, float* gated,
            int threads);

// out [rows, width] = act(x), which may be out.
void activate(float* out, const float* x, int64_t rows, int64_t width, const Activation& how,
              int threads);

int rope_and_cache(const RopeArgs& r, int threads);
// The status of invalid arguments of rope_and_cache.
int check_rope(const RopeArgs& r);

int paged_attention(const AttentionArgs& a, int threads);
// The status of invalid arguments of paged_attention.
int check_attention(const AttentionArgs& a);

// out [count, k]: the rows `ids` of W; fails for ids out of range.
int unpack_rows(const Packed& w, float* out, const int64_t* ids, int64_t count, int threads);

// out[r]: the first maximum of row r's logits, or -1 if that isn't finite or one is NaN.
int choose_likeliest(int64_t* out, const float* logits, int64_t rows, int64_t vocab, int threads);

struct Sampling {
  const float* temperature;  // [rows]; 0 for the most likely token
  const int64_t* top_k;
  const double *top_p, *min_p;
  const double* uniforms;  // in [0, 1)
};

// The same, and a draw if temperature isn't 0.
int choose_sampled(int64_t* out, const float* logits, int64_t rows, int64_t vocab,
                   const Sampling& how, int threads);

}  // namespace quire
