// engine/models/layers/mla.py has the same as separate operations, with the same bits.
#include "latents.h"

namespace quire {
namespace {

int64_t width_of(const LatentLayer& l) { return l.rotary + l.latent; }

char* bytes(float* x) { return reinterpret_cast<char*>(x); }
const char* bytes(const float* x) { return reinterpret_cast<const char*>(x); }

}  // namespace

int project_latents(const LatentLayer& l, float* q, int64_t stride, const float* x, int64_t heads,
                    int64_t tokens, int threads) {
  const int64_t width = l.inputs->n, first = width - width_of(l), size = l.rest + l.rotary;
  float *projected, *low, *queries;
  Layout layout;
  layout.add(&projected, tokens * width);
  layout.add(&low, l.queries ? tokens * first : 0);
  layout.add(&queries, l.queries ? tokens * heads * size : 0);
  layout.take(Scratch::kMixer);
  int wrong = linear(*l.inputs, projected, x, l.inputs->k, tokens, kF32, threads);
  if (wrong) return wrong;
  for (int64_t t = 0; t < tokens; t++) {
    const float* latent = projected + t * width + first;
    float* cached = q + t * stride + heads * width_of(l);
    std::memcpy(cached, latent + l.latent, l.rotary * sizeof(float));
    rms_norm(cached + l.rotary, latent, l.latent_norm, 1, l.latent, l.eps, 1);
  }
  const float* from = projected;
  int64_t distance = width;
  if (l.queries) {
    for (int64_t t = 0; t < tokens; t++)
      std::memcpy(low + t * first, projected + t * width, first * sizeof(float));
    rms_norm(low, low, l.query_norm, tokens, first, l.eps, threads);
    wrong = linear(*l.queries, queries, low, first, tokens, kF32, threads);
    if (wrong) return wrong;
    from = queries, distance = heads * size;
  }
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t h = 0; h < heads; h++)
      std::memcpy(q + t * stride + h * width_of(l), from + t * distance + h * size + l.rest,
                  l.rotary * sizeof(float));
  return linear_heads({l.into, heads, bytes(q + l.rotary), bytes(from), stride, width_of(l),
                       distance, size, tokens, kF32},
                      threads);
}

int values_of_latents(const LatentLayer& l, float* out, const float* sums, int64_t heads,
                      int64_t rows, int threads) {
  return linear_heads({l.out_of, heads, bytes(out), bytes(sums + l.rotary), heads * l.value_size,
                       l.value_size, heads * width_of(l), width_of(l), rows, kF32},
                      threads);
}

}  // namespace quire
