// The parts of a decoder.
#pragma once

#include <vector>

#include "experts.h"
#include "kv_pages.h"
#include "lora.h"
#include "ranks.h"

namespace quire {

struct Decoder {
  DecoderShape shape;
  std::vector<DecoderLayer> layers;
  Norm final_norm;
  mutable std::vector<KvPages> pages;  // of each group; a decoder has one caller at a time
};

inline bool attends(const DecoderLayer& layer) { return layer.qkv || layer.latents; }

// Tokens of a block in this process's caches.
inline int64_t local_tokens(const DecoderShape& s) {
  return s.ranks ? s.block_size / static_cast<RankGroup*>(s.ranks)->size() : s.block_size;
}

struct DecoderBatch {
  int64_t tokens;
  const int64_t* positions;
  const DecoderGroup* groups;
  int64_t num_groups;
  const int32_t *seq_lens, *starts;
  int64_t num_seqs;
  const int64_t* rows;  // of the tokens that continue after the last attention
  int64_t num_rows;     // -1 for all
  const LoraGroup* adapters;  // of the tokens with adapters
  int64_t num_adapters;
  const int64_t* taps;  // layers, ascending, whose inputs are returned
  int64_t num_taps;
  float* tapped;        // [tokens, num_taps * hidden], these inputs side by side
  const StateRows* states;      // the blocks of the layers' states; null without states
  const int64_t* num_computed;  // [num_seqs]; at 0 a state starts from zero; null if all are ready
};

// residual [tokens, hidden]: the embeddings, overwritten; out [num_rows, hidden], or all tokens if
// num_rows is -1. All arguments are checked before anything is written to a cache.
int run_decoder(const Decoder& decoder, const DecoderBatch& batch, float* residual, float* out,
                int threads);

}  // namespace quire
