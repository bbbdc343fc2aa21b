// The projections around attention over latents.
#pragma once

#include "ops.h"

namespace quire {

// From x [tokens, hidden] to queries q [tokens, heads, width] and to what is cached of each token,
// [tokens, width] behind the queries, before rotation. `stride`: from token to token of q.
int project_latents(const LatentLayer& l, float* q, int64_t stride, const float* x, int64_t heads,
                    int64_t tokens, int threads);

// out [rows, heads, value_size] from weighted sums of cached tokens, [rows, heads, width].
int values_of_latents(const LatentLayer& l, float* out, const float* sums, int64_t heads,
                      int64_t rows, int threads);

}  // namespace quire
