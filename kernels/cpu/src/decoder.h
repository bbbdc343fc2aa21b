// What a decoder is made of.
#pragma once

#include <vector>

#include "experts.h"
#include "kv_pages.h"
#include "lora.h"

namespace quire {

struct DecoderShape {
  int64_t hidden, q_heads, kv_heads, head_size, inner;
  int64_t num_blocks, block_size;
  int64_t max_position, rotary;
  float eps, scale, soft_cap, residual_scale;
  int32_t cache_dtype, neox, gated, parallel;
  Activation act;
  float clip_qkv;  // 0: none
};

// LayerNorm of heads side by side.
struct HeadNorm {
  const float *weight, *bias;  // [heads or 1, head_size], [head_size] or null; no weight: no norm
  int64_t stride;              // from a head's weight to the next one's: head_size or 0
};

struct DecoderLayer {
  Norm input_norm;
  const Packed* qkv;
  const float *q_norm, *k_norm;            // RMS of heads, [head_size] or null
  const float *q_full_norm, *k_full_norm;  // RMS of all heads together, or null
  HeadNorm q_head_norm, k_head_norm;
  const float* cos_sin;                // [max_position, rotary] or null
  void *key_cache, *value_cache;
  float *key_scales, *value_scales;    // int8 caches only
  int64_t window;
  Sparse sparse;
  const float *alibi, *sinks;          // [q_heads] or null
  const Packed* o;
  Norm attention_out_norm;             // of what attention adds to the residual
  Norm mlp_norm;                       // parallel: kNoNorm takes what attention took
  const Packed *gate_up, *down;
  const Experts* experts;              // in place of both; or null
  Norm mlp_out_norm;                   // of what the MLP adds to the residual
  int64_t group;                       // whose slots and block table are this layer's
};

// Where the layers of one group keep the step's tokens, and find those before.
struct DecoderGroup {
  const int64_t* slots;         // [tokens]
  const int32_t* block_tables;  // [num_seqs, table_stride]
  int64_t table_stride;
};

struct Decoder {
  DecoderShape shape;
  std::vector<DecoderLayer> layers;
  Norm final_norm;
  mutable std::vector<KvPages> pages;  // of each group; a decoder has one caller at a time
};

struct DecoderBatch {
  int64_t tokens;
  const int64_t* positions;
  const DecoderGroup* groups;
  int64_t num_groups;
  const int32_t *seq_lens, *starts;
  int64_t num_seqs;
  const int64_t* rows;  // of the tokens that go on after the last attention
  int64_t num_rows;     // -1: all do
  const LoraGroup* adapters;  // of the tokens that go through one
  int64_t num_adapters;
  const int64_t* taps;  // layers, ascending, whose inputs are wanted
  int64_t num_taps;
  float* tapped;        // [tokens, num_taps * hidden], these side by side
};

// residual [tokens, hidden]: the embeddings, overwritten; out [num_rows, hidden], or all tokens
// when num_rows is -1. Everything that can be refused is, before the first byte of any cache is
// written.
int run_decoder(const Decoder& decoder, const DecoderBatch& batch, float* residual, float* out,
                int threads);

}  // namespace quire
