// All layers of a decoder in one call, without Python between the first norm and the last.
#include <algorithm>
#include <memory>
#include <numeric>

#include "decoder.h"
#include "latents.h"
#include "mixers.h"

namespace quire {
namespace {

// Tokens that an MLP processes together; bounds its buffers for long prompts.
constexpr int64_t kMlpRows = 512;

// A call: its buffers are allocated once and used by each layer.
struct Run {
  const Decoder& decoder;
  const DecoderBatch& batch;
  int threads;
  float* residual;    // [tokens, hidden]; in the last layer only the kept rows
  int64_t q_width, qkv_width;
  float* x;           // [tokens, hidden], input and output of a block
  float* qkv;         // [tokens, qkv_width]
  float* all_heads;   // [tokens, queries, keys and values of all ranks], for norms over all
  float* attention;   // [tokens, q_width]
  float *gated, *inner;  // [kMlpRows, 2 inner], [kMlpRows, inner]
  float* other;       // [tokens, hidden]: attention in a parallel layer, or the experts' output
  float* gates;       // [tokens, q_width], of attention's outputs
  float* values;      // [tokens, heads * value_size], from latents
  float *embeddings, *both;  // [tokens, hidden], [tokens, 2 hidden], of shared blocks
  float *kept_x, *kept_residual, *kept_attention;  // of the rows that are needed
  const LoraGroup* adapters;  // of the current rows: first all tokens, then those kept
  int64_t num_adapters;
  LoraGroup added;            // of a shared block, for all tokens
  std::vector<int64_t> all_rows;
  std::vector<LoraGroup> kept_adapters;
  std::vector<int64_t> kept_rows;
  const DecoderShape& shape() const { return decoder.shape; }
};

LayerAdapters adapters_of(const Run& run, int64_t layer) {
  return {run.adapters, run.num_adapters, layer};
}

LayerAdapters added_of(const Run& run) { return {&run.added, 1, 0}; }

// run_mlp with adapters.
int run_adapted_mlp(Run& run, const LayerAdapters& adapters, const Mlp& w, float* x, int64_t low,
                    int64_t rows) {
  const int64_t hidden = run.shape().hidden;
  int wrong;
  if (w.gated) {
    wrong = adapted_gated_linear(adapters, &LoraLayer::up, *w.gate_up, run.inner, run.gated, x,
                                 w.inner, low, rows, w.act, run.threads);
  } else {
    wrong = adapted_linear(adapters, &LoraLayer::up, *w.gate_up, run.inner, x, hidden, low, rows,
                           run.threads);
    activate(run.inner, run.inner, rows, w.inner, w.act, run.threads);
  }
  if (wrong) return wrong;
  return adapted_linear(adapters, &LoraLayer::down, *w.down, x, run.inner, w.inner, low, rows,
                        run.threads);
}

// The adapters of the kept rows, by their new indices.
void keep_adapters(Run& run) {
  if (!run.num_adapters) return;
  const DecoderBatch& b = run.batch;
  std::vector<int64_t> starts;
  for (int64_t g = 0; g < run.num_adapters; g++) {
    const LoraGroup& group = run.adapters[g];
    starts.push_back(static_cast<int64_t>(run.kept_rows.size()));
    for (int64_t i = 0; i < b.num_rows; i++)
      if (std::binary_search(group.rows, group.rows + group.count, b.rows[i]))
        run.kept_rows.push_back(i);
  }
  starts.push_back(static_cast<int64_t>(run.kept_rows.size()));
  for (int64_t g = 0; g < run.num_adapters; g++)
    run.kept_adapters.push_back({run.adapters[g].layers, run.kept_rows.data() + starts[g],
                                 starts[g + 1] - starts[g]});
  run.adapters = run.kept_adapters.data();
}

// Where this rank's caches have the batch's tokens, [num_groups, tokens]: -1 for another rank's.
std::vector<int64_t> local_slots(const DecoderShape& s, const DecoderBatch& batch) {
  std::vector<int64_t> slots;
  const int64_t size = local_tokens(s), rank = static_cast<RankGroup*>(s.ranks)->rank();
  for (int64_t group = 0; group < batch.num_groups; group++) {
    for (int64_t t = 0; t < batch.tokens; t++) {
      const int64_t slot = batch.groups[group].slots[t], in_block = slot % s.block_size;
      const bool is_local = slot >= 0 && in_block / size == rank;
      slots.push_back(is_local ? slot / s.block_size * size + in_block % size : -1);
    }
  }
  return slots;
}

RopeArgs rope_of(const Run& run, const DecoderLayer& layer) {
  const DecoderShape& s = run.shape();
  const int64_t kv = s.kv_heads * s.head_size;
  RopeArgs r{};
  r.q = run.qkv, r.k = run.qkv + run.qkv_width - 2 * kv, r.v = run.qkv + run.qkv_width - kv;
  if (layer.latents) r.v = r.k;
  r.q_stride = r.k_stride = r.v_stride = run.qkv_width;
  r.tokens = run.batch.tokens;
  r.q_heads = s.q_heads, r.kv_heads = s.kv_heads, r.head_size = s.head_size;
  r.positions = run.batch.positions;
  r.cos_sin = layer.cos_sin, r.max_position = s.max_position, r.rotary = s.rotary;
  r.key_cache = layer.key_cache, r.value_cache = layer.value_cache;
  r.key_scales = layer.key_scales, r.value_scales = layer.value_scales;
  r.num_blocks = s.num_blocks, r.block_size = local_tokens(s);
  r.slots = run.batch.groups[layer.group].slots;
  r.q_norm = layer.q_norm, r.k_norm = layer.k_norm;
  r.eps = s.eps;
  r.norm_dtype = r.dtype = kF32;
  r.neox = s.neox, r.cache_dtype = s.cache_dtype;
  return r;
}

// The last layer computes only the needed queries.
AttentionArgs attention_of(const Run& run, const DecoderLayer& layer, bool last) {
  const DecoderShape& s = run.shape();
  const DecoderBatch& b = run.batch;
  AttentionArgs a{};
  a.q = run.qkv, a.out = run.attention, a.q_stride = run.qkv_width;
  a.tokens = b.tokens;
  a.q_heads = s.q_heads, a.kv_heads = s.kv_heads, a.head_size = s.head_size;
  a.key_cache = layer.key_cache, a.value_cache = layer.value_cache;
  a.key_scales = layer.key_scales, a.value_scales = layer.value_scales;
  a.num_blocks = s.num_blocks, a.block_size = local_tokens(s), a.ranks = s.ranks;
  a.block_tables = b.groups[layer.group].block_tables;
  a.table_stride = b.groups[layer.group].table_stride;
  a.seq_lens = b.seq_lens, a.starts = b.starts, a.num_seqs = b.num_seqs;
  a.alibi = layer.alibi, a.sinks = layer.sinks;
  a.window = layer.window, a.sparse = layer.sparse;
  a.scale = s.scale, a.soft_cap = s.soft_cap;
  a.dtype = kF32, a.cache_dtype = s.cache_dtype;
  a.rows = b.rows, a.num_rows = last ? b.num_rows : -1;
  a.round_inputs = s.round_inputs;
  return a;
}

void scale(float* x, int64_t count, float factor) {
  if (factor == 1.0f) return;
  const vf by = vset(factor);
  for_lanes(count, [&](int64_t i, int n) { vstore_some(x + i, vload_some(x + i, n) * by, n); });
}

// Turns a block's output into its addition to the residual.
void finish(const Run& run, const Norm& out_norm, float* x, int64_t rows) {
  const DecoderShape& s = run.shape();
  if (out_norm.kind != kNoNorm) norm(out_norm, x, x, rows, s.hidden, s.eps, run.threads);
  scale(x, rows * s.hidden, s.residual_scale);
}

void norm_heads(const Run& run, const HeadNorm& of, float* head, int64_t heads) {
  const DecoderShape& s = run.shape();
  for (int64_t h = 0; h < heads && of.weight; h++, head += s.head_size)
    layer_norm_row(head, of.weight + h * of.stride, of.bias, s.head_size, s.eps);
}

// Moves the heads' gates from between the queries to run.gates.
void split_gates(const Run& run) {
  const int64_t size = run.shape().head_size, heads = run.shape().q_heads;
  for (int64_t t = 0; t < run.batch.tokens; t++) {
    float *q = run.qkv + t * run.qkv_width, *gates = run.gates + t * run.q_width;
    for (int64_t h = 0; h < heads; h++) {
      std::memcpy(gates + h * size, q + (2 * h + 1) * size, size * sizeof(float));
      std::memmove(q + h * size, q + 2 * h * size, size * sizeof(float));
    }
  }
}

// Changes that some families apply to queries, keys and values before rotary embedding.
void prepare_qkv(const Run& run, const DecoderLayer& layer) {
  const DecoderShape& s = run.shape();
  const bool normed = layer.q_head_norm.weight || layer.k_head_norm.weight;
  if (!normed && s.clip_qkv == 0) return;
  const int64_t kv = s.kv_heads * s.head_size;
  deal_ranges(worth(run.threads, run.batch.tokens * run.qkv_width, 16384), run.batch.tokens, 1,
              [&](int64_t low, int64_t high) {
    for (int64_t t = low; t < high; t++) {
      float *q = run.qkv + t * run.qkv_width, *k = q + run.qkv_width - 2 * kv;
      norm_heads(run, layer.q_head_norm, q, s.q_heads);
      norm_heads(run, layer.k_head_norm, k, s.kv_heads);
      if (s.clip_qkv == 0) continue;
      const vf most = vset(s.clip_qkv), least = vset(-s.clip_qkv);
      for_lanes(run.qkv_width, [&](int64_t i, int n) {
        vstore_some(q + i, vmin(most, vmax(least, vload_some(q + i, n))), n);
      });
    }
  });
}

// After the last attention, tokens don't depend on each other: only the needed ones continue.
int64_t keep_rows(Run& run, int64_t tokens) {
  const DecoderBatch& b = run.batch;
  if (b.num_rows < 0) return tokens;
  const auto keep = [&](float*& all, float* kept, int64_t width) {
    for (int64_t i = 0; i < b.num_rows; i++)
      std::memcpy(kept + i * width, all + b.rows[i] * width, width * sizeof(float));
    all = kept;
  };
  keep(run.x, run.kept_x, run.shape().hidden);
  keep(run.residual, run.kept_residual, run.shape().hidden);
  keep(run.attention, run.kept_attention, run.q_width);
  keep_adapters(run);
  return b.num_rows;
}

// Whether a norm is over all ranks' heads, of which this rank keeps its own.
bool norms_other_ranks(const Run& run, const DecoderLayer& layer) {
  return layer.q_full_norm && layer.qkv->outputs() != run.qkv_width;
}

// Norms all heads together, and moves this rank's to run.qkv.
void norm_all_heads(const Run& run, const DecoderLayer& layer, int64_t rows) {
  const DecoderShape& s = run.shape();
  const int64_t width = layer.qkv->outputs(), local_kv = s.kv_heads * s.head_size;
  const bool keeps = norms_other_ranks(run, layer);
  const int64_t size = keeps ? layer.qkv->shard->group->size() : 1;
  const int64_t rank = keeps ? layer.qkv->shard->group->rank() : 0;
  const int64_t q_width = run.q_width * size, kv = (width - q_width) / 2;
  // With fewer heads than ranks, several ranks have the same.
  const int64_t first = kv / s.head_size * rank / size * s.head_size;
  float* all = keeps ? run.all_heads : run.qkv;
  deal_ranges(worth(run.threads, rows * width, 16384), rows, 1, [&](int64_t low, int64_t high) {
    for (int64_t t = low; t < high; t++) {
      float *q = all + t * width, *k = q + q_width, *v = k + kv;
      rms_norm(q, q, layer.q_full_norm, 1, q_width, s.eps, 1);
      rms_norm(k, k, layer.k_full_norm, 1, kv, s.eps, 1);
      if (!keeps) continue;
      float* to = run.qkv + t * run.qkv_width;
      std::memcpy(to, q + rank * run.q_width, run.q_width * sizeof(float));
      std::memcpy(to + run.q_width, k + first, local_kv * sizeof(float));
      std::memcpy(to + run.q_width + local_kv, v + first, local_kv * sizeof(float));
    }
  });
}

// From x to run.qkv.
int project(Run& run, const DecoderLayer& layer, const float* x, int64_t rows) {
  const int64_t index = &layer - run.decoder.layers.data();
  if (layer.latents)
    return project_latents(*layer.latents, run.qkv, run.qkv_width, x, run.shape().q_heads, rows,
                           run.threads);
  const LayerAdapters adapters = layer.shared ? added_of(run) : adapters_of(run, index);
  float* out = norms_other_ranks(run, layer) ? run.all_heads : run.qkv;
  const int wrong = adapted_linear(adapters, &LoraLayer::qkv, *layer.qkv, out, x, layer.qkv->k, 0,
                                   rows, run.threads);
  if (!wrong && layer.q_full_norm) norm_all_heads(run, layer, rows);
  return wrong;
}

// From x to `out`; null for run.x. The last layer returns only the needed rows.
int attend(Run& run, const DecoderLayer& layer, const float* x, float* out, bool last,
           int64_t* rows) {
  const DecoderShape& s = run.shape();
  const int64_t index = &layer - run.decoder.layers.data();
  int wrong = project(run, layer, x, *rows);
  if (wrong) return wrong;
  if (s.attention_output_gate) split_gates(run);
  prepare_qkv(run, layer);
  if (!wrong) wrong = rope_and_cache(rope_of(run, layer), run.threads);
  if (!wrong) wrong = paged_attention(attention_of(run, layer, last), run.threads);
  if (wrong) return wrong;
  if (s.attention_output_gate)
    gate_rows<kSigmoid>(run.attention, run.q_width, run.gates, run.q_width, run.attention,
                        run.batch.tokens, run.q_width, run.threads);
  if (last) *rows = keep_rows(run, *rows);
  if (!out) out = run.x;
  const float* attended = run.attention;
  int64_t width = run.q_width;
  if (const LatentLayer* l = layer.latents) {
    wrong = values_of_latents(*l, run.values, attended, s.q_heads, *rows, run.threads);
    if (wrong) return wrong;
    attended = run.values, width = s.q_heads * l->value_size;
  }
  wrong = adapted_linear(adapters_of(run, index), &LoraLayer::o, *layer.o, out, attended, width, 0,
                         *rows, run.threads);
  if (wrong) return wrong;
  scale(out, *rows * s.hidden, s.attention_output_scale);
  finish(run, layer.attention_out_norm, out, *rows);
  return wrong;
}

// From run.x to `out`, which may be run.x: updates a state with the step's tokens.
int carry(Run& run, const DecoderLayer& layer, float* out) {
  const DecoderBatch& b = run.batch;
  const StateLayer& state = *layer.state;
  const int64_t index = &layer - run.decoder.layers.data();
  const MixerCall call{run.x,          out,
                       *b.states,      b.positions,
                       b.num_computed, adapters_of(run, index),
                       run.threads};
  if (const int wrong = run_mixer(state, call)) return wrong;
  scale(out, b.tokens * run.shape().hidden, state.output_scale);
  finish(run, layer.attention_out_norm, out, b.tokens);
  return kOk;
}

void add(float* x, const float* y, int64_t count) {
  for_lanes(count, [&](int64_t i, int n) {
    vstore_some(x + i, vload_some(x + i, n) + vload_some(y + i, n), n);
  });
}

// run.x = norm(residual + linear(mlp(norm(attention(norm(residual and embedding)))))).
int run_shared(Run& run, const DecoderLayer& layer) {
  const DecoderShape& s = run.shape();
  const SharedBlock& block = *layer.shared;
  int64_t rows = run.batch.tokens;
  run.added = {&block.added, run.all_rows.data(), rows};
  for (int64_t t = 0; t < rows; t++) {
    float* to = run.both + 2 * t * s.hidden;
    std::memcpy(to, run.residual + t * s.hidden, s.hidden * sizeof(float));
    std::memcpy(to + s.hidden, run.embeddings + t * s.hidden, s.hidden * sizeof(float));
  }
  norm(block.attention_norm, run.both, run.both, rows, 2 * s.hidden, s.eps, run.threads);
  int wrong = attend(run, layer, run.both, nullptr, false, &rows);
  if (wrong) return wrong;
  norm(block.mlp_norm, run.x, run.x, rows, s.hidden, s.eps, run.threads);
  const Mlp mlp{block.gate_up, block.down, s.inner, s.gated, s.act};
  for (int64_t row = 0; row < rows && !wrong; row += kMlpRows) {
    const int64_t count = std::min(kMlpRows, rows - row);
    wrong = run_adapted_mlp(run, added_of(run), mlp, run.x + row * s.hidden, row, count);
  }
  if (!wrong) wrong = linear(*block.output, run.other, run.x, s.hidden, rows, kF32, run.threads);
  if (wrong) return wrong;
  add(run.other, run.residual, rows * s.hidden);
  norm(block.mixer_norm, run.x, run.other, rows, s.hidden, s.eps, run.threads);
  return kOk;
}

// Attention, a state, the sum of both, or a state after a shared block.
int mix(Run& run, const DecoderLayer& layer, bool last, int64_t* rows) {
  if (!layer.state) return attend(run, layer, run.x, nullptr, last, rows);
  const bool beside = attends(layer) && !layer.shared;
  int wrong = layer.shared ? run_shared(run, layer) : kOk;
  if (!wrong) wrong = carry(run, layer, beside ? run.other : run.x);
  if (!wrong && beside) {
    wrong = attend(run, layer, run.x, nullptr, false, rows);
    add(run.x, run.other, *rows * run.shape().hidden);
  }
  if (!wrong && last) *rows = keep_rows(run, *rows);
  return wrong;
}

// run_mlp with a factor of the gates.
int run_scaled_mlp(Run& run, const Mlp& w, float* x, int64_t rows) {
  int wrong = linear(*w.gate_up, run.gated, x, w.gate_up->k, rows, kF32, run.threads);
  if (wrong) return wrong;
  for (int64_t row = 0; row < rows; row++)
    scale(run.gated + row * 2 * w.inner, w.inner, run.shape().mlp_gate_scale);
  gate_and_mul(run.inner, run.gated, rows, w.inner, w.act, run.threads);
  return linear(*w.down, x, run.inner, w.inner, rows, kF32, run.threads);
}

int feed_forward(Run& run, const DecoderLayer& layer, int64_t rows) {
  const DecoderShape& s = run.shape();
  const int64_t index = &layer - run.decoder.layers.data();
  int wrong = kOk;
  if (layer.experts) {
    // A parallel layer has no experts, so `other` is unused.
    wrong = run_experts(*layer.experts, run.other, run.x, rows, adapters_of(run, index), run.threads);
    std::swap(run.x, run.other);
  }
  const Mlp mlp{layer.gate_up, layer.down, s.inner, s.gated, s.act};
  for (int64_t row = 0; row < rows && !layer.experts && !wrong; row += kMlpRows) {
    float* x = run.x + row * s.hidden;
    const int64_t count = std::min(kMlpRows, rows - row);
    if (run.num_adapters) wrong = run_adapted_mlp(run, adapters_of(run, index), mlp, x, row, count);
    else if (s.mlp_gate_scale != 1.0f) wrong = run_scaled_mlp(run, mlp, x, count);
    else wrong = run_mlp(mlp, x, x, count, run.inner, run.gated, run.threads);
    scale(x, count * s.hidden, s.mlp_output_scale);
  }
  finish(run, layer.mlp_out_norm, run.x, rows);
  return wrong;
}

// With a normed residual: residual = x * factor, where x is what the norm gave.
void replace_residual(const Run& run, float factor, int64_t rows) {
  if (!run.shape().normed_residual) return;
  const int64_t count = rows * run.shape().hidden;
  std::memcpy(run.residual, run.x, count * sizeof(float));
  scale(run.residual, count, factor);
}

// residual += attention(norm(residual)); residual += mlp(norm(residual)). Either may be missing.
int run_sequential(Run& run, const DecoderLayer& layer, bool last, int64_t* rows) {
  const DecoderShape& s = run.shape();
  const bool mixes = attends(layer) || layer.state, feeds = layer.gate_up || layer.experts;
  if (mixes) {
    replace_residual(run, layer.state ? s.state_residual : s.attention_residual, *rows);
    if (const int wrong = mix(run, layer, last, rows)) return wrong;
  } else if (last) {
    *rows = keep_rows(run, *rows);
  }
  if (!feeds) return kOk;
  if (mixes) add_norm(layer.mlp_norm, run.x, run.x, run.residual, *rows, s.hidden, s.eps, run.threads);
  replace_residual(run, s.mlp_residual, *rows);
  return feed_forward(run, layer, *rows);
}

// residual += attention(norm(residual)) + mlp(norm'(residual)); norm' may be the same norm.
int run_parallel(Run& run, const DecoderLayer& layer, bool last, int64_t* rows) {
  const DecoderShape& s = run.shape();
  if (const int wrong = attend(run, layer, run.x, run.other, last, rows)) return wrong;
  if (layer.mlp_norm.kind != kNoNorm)
    norm(layer.mlp_norm, run.x, run.residual, *rows, s.hidden, s.eps, run.threads);
  const int wrong = feed_forward(run, layer, *rows);
  for_lanes(*rows * s.hidden, [&](int64_t i, int n) {
    vstore_some(run.x + i, vload_some(run.x + i, n) + vload_some(run.other + i, n), n);
  });
  return wrong;
}

// Copies a layer's input to the place of its tap.
void copy_input(const Run& run, int64_t tap) {
  const int64_t hidden = run.shape().hidden, tokens = run.batch.tokens;
  for (int64_t t = 0; t < tokens; t++)
    std::memcpy(run.batch.tapped + (t * run.batch.num_taps + tap) * hidden,
                run.residual + t * hidden, hidden * sizeof(float));
}

int run_layers(Run& run, float* out) {
  const DecoderShape& s = run.shape();
  const auto& layers = run.decoder.layers;
  int64_t rows = run.batch.tokens, tap = 0;
  norm(layers[0].input_norm, run.x, run.residual, rows, s.hidden, s.eps, run.threads);
  for (size_t i = 0; i < layers.size(); i++) {
    const bool last = i + 1 == layers.size();
    if (tap < run.batch.num_taps && run.batch.taps[tap] == static_cast<int64_t>(i))
      copy_input(run, tap++);
    const auto run_layer = s.parallel ? run_parallel : run_sequential;
    if (const int wrong = run_layer(run, layers[i], last, &rows)) return wrong;
    const Norm& next = last ? run.decoder.final_norm : layers[i + 1].input_norm;
    add_norm(next, last ? out : run.x, run.x, run.residual, rows, s.hidden, s.eps, run.threads);
  }
  return kOk;
}

int check_rows(const DecoderBatch& b) {
  for (int64_t i = 0; i < b.num_rows; i++) {
    if (b.rows[i] < 0 || b.rows[i] >= b.tokens) return kBadRow;
  }
  for (int64_t g = 0; g < b.num_adapters; g++)
    for (int64_t i = 0; i < b.adapters[g].count; i++)
      if (b.adapters[g].rows[i] < 0 || b.adapters[g].rows[i] >= b.tokens) return kBadRow;
  return kOk;
}

// A layer of the group, with rotary embedding if any has it: all use the same slots and tables.
const DecoderLayer* layer_to_check(const Decoder& decoder, int64_t group) {
  const DecoderLayer* found = nullptr;
  for (const DecoderLayer& layer : decoder.layers) {
    if (!attends(layer) || layer.group != group) continue;
    if (!found || (layer.cos_sin && !found->cos_sin)) found = &layer;
  }
  return found;
}

// Values of a token's heads, if they come from latents.
int64_t value_width(const Decoder& decoder) {
  int64_t most = 0;
  for (const DecoderLayer& layer : decoder.layers)
    if (layer.latents) most = std::max(most, decoder.shape.q_heads * layer.latents->value_size);
  return most;
}

// Queries, keys and values of all ranks, if a norm is over them.
int64_t all_heads_width(const Run& run) {
  int64_t most = 0;
  for (const DecoderLayer& layer : run.decoder.layers)
    if (norms_other_ranks(run, layer)) most = std::max(most, layer.qkv->outputs());
  return most;
}

int run_batch(const Decoder& decoder, const DecoderBatch& batch, float* residual, float* out,
              int threads) {
  const DecoderShape& s = decoder.shape;
  const int64_t q = s.q_heads * s.head_size;
  const int64_t qkv = (s.attention_output_gate ? 2 : 1) * q + 2 * s.kv_heads * s.head_size;
  const int64_t kept = std::max<int64_t>(0, batch.num_rows);
  const int64_t mlp_rows = std::min(std::max(batch.tokens, kept), kMlpRows);
  Run run{decoder, batch, threads, residual, q, qkv};
  run.adapters = batch.adapters, run.num_adapters = batch.num_adapters;
  const auto& layers = decoder.layers;
  const bool shares = std::any_of(layers.begin(), layers.end(),
                                  [](const DecoderLayer& layer) { return layer.shared; });
  Layout layout;
  layout.add(&run.x, batch.tokens * s.hidden);
  layout.add(&run.qkv, batch.tokens * qkv);
  layout.add(&run.all_heads, batch.tokens * all_heads_width(run));
  layout.add(&run.attention, batch.tokens * q);
  layout.add(&run.gated, mlp_rows * 2 * s.inner);
  layout.add(&run.inner, mlp_rows * s.inner);
  layout.add(&run.kept_x, kept * s.hidden);
  layout.add(&run.kept_residual, kept * s.hidden);
  layout.add(&run.kept_attention, kept * q);
  layout.add(&run.other, batch.tokens * s.hidden);
  layout.add(&run.gates, s.attention_output_gate ? batch.tokens * q : 0);
  layout.add(&run.values, std::max(batch.tokens, kept) * value_width(decoder));
  layout.add(&run.embeddings, shares ? batch.tokens * s.hidden : 0);
  layout.add(&run.both, shares ? 2 * batch.tokens * s.hidden : 0);
  layout.take(Scratch::kDecoder);
  int wrong = check_rows(batch);
  for (const DecoderLayer& layer : decoder.layers) {
    if (attends(layer) && layer.group >= batch.num_groups) return kBadSequence;
    if (layer.state && !batch.states) return kBadSequence;
  }
  for (int64_t group = 0; group < batch.num_groups && !wrong; group++) {
    if (const DecoderLayer* layer = layer_to_check(decoder, group)) {
      wrong = check_rope(rope_of(run, *layer));
      if (!wrong) wrong = check_attention(attention_of(run, *layer, false));
    }
  }
  if (wrong) return wrong;
  for (size_t group = 0; group < decoder.pages.size(); group++)
    decoder.pages[group].prepare(batch.groups[group].slots, batch.tokens, threads);
  if (shares) {
    std::memcpy(run.embeddings, residual, batch.tokens * s.hidden * sizeof(float));
    run.all_rows.resize(batch.tokens);
    std::iota(run.all_rows.begin(), run.all_rows.end(), 0);
  }
  return run_layers(run, out);
}

}  // namespace

int run_decoder(const Decoder& decoder, const DecoderBatch& batch, float* residual, float* out,
                int threads) {
  if (!decoder.shape.ranks) return run_batch(decoder, batch, residual, out, threads);
  const std::vector<int64_t> slots = local_slots(decoder.shape, batch);
  std::vector<DecoderGroup> groups(batch.groups, batch.groups + batch.num_groups);
  for (int64_t group = 0; group < batch.num_groups; group++)
    groups[group].slots = slots.data() + group * batch.tokens;
  DecoderBatch local = batch;
  local.groups = groups.data();
  return run_batch(decoder, local, residual, out, threads);
}

}  // namespace quire
