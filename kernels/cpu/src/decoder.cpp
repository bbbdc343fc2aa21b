// All layers of a decoder in one call: no Python between the first norm and the last.
#include <memory>
#include <vector>

#include "ops.h"

namespace quire {
namespace {

// Tokens that go through an MLP together; bounds its buffers for long prompts.
constexpr int64_t kMlpRows = 512;

}  // namespace

// kernels/cpu/decoder.py has the same fields in the same order.
struct DecoderShape {
  int64_t hidden, q_heads, kv_heads, head_size, inner;
  int64_t num_blocks, block_size;
  int64_t max_position, rotary;
  float eps, scale, soft_cap;
  int32_t cache_dtype, neox, gate;
};

struct DecoderLayer {
  const float* input_norm;
  const Packed* qkv;
  const float *q_norm, *k_norm;        // [head_size] or null
  const float* cos_sin;                // [max_position, rotary] or null
  void *key_cache, *value_cache;
  float *key_scales, *value_scales;    // int8 caches only
  int64_t window;
  const float* sinks;                  // [q_heads] or null
  const Packed* o;
  const float* attention_out_norm;     // of what attention adds to the residual; or null
  const float* mlp_norm;
  const Packed *gate_up, *down;
  const float* mlp_out_norm;           // of what the MLP adds to the residual; or null
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
  const float* final_norm;
};

namespace {

struct Batch {
  int64_t tokens;
  const int64_t* positions;
  const DecoderGroup* groups;
  int64_t num_groups;
  const int32_t *seq_lens, *starts;
  int64_t num_seqs;
  const int64_t* rows;  // of the tokens that go on after the last attention
  int64_t num_rows;     // -1: all do
};

// One call: its buffers are laid out once and used by each layer.
struct Run {
  const Decoder& decoder;
  const Batch& batch;
  int threads;
  float *residual, *x, *qkv, *attention, *gated, *inner, *kept_x, *kept_residual;
  int64_t qkv_width, q_width;

  const DecoderShape& shape() const { return decoder.shape; }
};

Rope rope_of(const Run& run, const DecoderLayer& layer) {
  const DecoderShape& s = run.shape();
  const int64_t q = s.q_heads * s.head_size, kv = s.kv_heads * s.head_size;
  float* k = run.qkv + q;
  return Rope{run.qkv, k, k + kv, run.qkv_width, run.qkv_width, run.qkv_width,
              run.batch.positions, layer.cos_sin, s.max_position, layer.key_cache,
              layer.value_cache, layer.key_scales, layer.value_scales,
              run.batch.groups[layer.group].slots, s.num_blocks * s.block_size, s.block_size,
              layer.q_norm, layer.k_norm, kF32, s.eps, run.batch.tokens, s.q_heads, s.kv_heads,
              s.head_size, s.rotary, s.neox, kF32, s.cache_dtype};
}

Attention attention_of(const Run& run, const DecoderLayer& layer) {
  const DecoderShape& s = run.shape();
  const Batch& b = run.batch;
  const DecoderGroup& group = b.groups[layer.group];
  return Attention{run.qkv, run.qkv_width, kF32, layer.key_cache, layer.value_cache,
                   layer.key_scales, layer.value_scales, s.cache_dtype, s.num_blocks,
                   s.block_size, group.block_tables, group.table_stride, b.seq_lens, b.starts, b.num_seqs, s.scale, layer.window,
                   s.soft_cap, nullptr, layer.sinks, run.attention, s.q_heads, s.kv_heads,
                   s.head_size};
}

// Turns what a block adds to the residual into what it adds after its own norm, where it has one.
void out_norm(const Run& run, const float* weight, int64_t rows) {
  const DecoderShape& s = run.shape();
  if (weight) rms_norm(run.x, run.x, weight, rows, s.hidden, s.eps, run.threads);
}

int attend(const Run& run, const DecoderLayer& layer) {
  const DecoderShape& s = run.shape();
  const int64_t tokens = run.batch.tokens;
  int wrong = linear(*layer.qkv, run.qkv, run.x, s.hidden, tokens, kF32, run.threads);
  if (!wrong) wrong = rope_and_cache(rope_of(run, layer), run.threads);
  if (!wrong) wrong = paged_attention(attention_of(run, layer), run.threads);
  if (!wrong) wrong = linear(*layer.o, run.x, run.attention, run.q_width, tokens, kF32, run.threads);
  out_norm(run, layer.attention_out_norm, tokens);
  return wrong;
}

int feed_forward(const Run& run, const DecoderLayer& layer, int64_t rows) {
  const DecoderShape& s = run.shape();
  for (int64_t row = 0; row < rows; row += kMlpRows) {
    const int64_t count = std::min(kMlpRows, rows - row);
    float* x = run.x + row * s.hidden;
    int wrong = linear(*layer.gate_up, run.gated, x, s.hidden, count, kF32, run.threads);
    gate_and_mul(run.inner, run.gated, count, s.inner, s.gate, run.threads);
    if (!wrong) wrong = linear(*layer.down, x, run.inner, s.inner, count, kF32, run.threads);
    if (wrong) return wrong;
  }
  out_norm(run, layer.mlp_out_norm, rows);
  return kOk;
}

// After the last attention tokens don't meet any more: only those that are wanted go on.
int64_t keep_rows(Run& run, int64_t tokens) {
  const Batch& b = run.batch;
  if (b.num_rows < 0) return tokens;
  const int64_t width = run.shape().hidden, bytes = width * static_cast<int64_t>(sizeof(float));
  for (int64_t i = 0; i < b.num_rows; i++) {
    std::memcpy(run.kept_x + i * width, run.x + b.rows[i] * width, bytes);
    std::memcpy(run.kept_residual + i * width, run.residual + b.rows[i] * width, bytes);
  }
  run.x = run.kept_x, run.residual = run.kept_residual;
  return b.num_rows;
}

int run_layers(Run& run, float* out) {
  const DecoderShape& s = run.shape();
  const auto& layers = run.decoder.layers;
  int64_t rows = run.batch.tokens;
  rms_norm(run.x, run.residual, layers[0].input_norm, rows, s.hidden, s.eps, run.threads);
  for (size_t i = 0; i < layers.size(); i++) {
    const bool last = i + 1 == layers.size();
    if (const int wrong = attend(run, layers[i])) return wrong;
    if (last) rows = keep_rows(run, rows);
    add_rms_norm(run.x, run.x, run.residual, layers[i].mlp_norm, rows, s.hidden, s.eps,
                 run.threads);
    if (const int wrong = feed_forward(run, layers[i], rows)) return wrong;
    const float* next = last ? run.decoder.final_norm : layers[i + 1].input_norm;
    add_rms_norm(last ? out : run.x, run.x, run.residual, next, rows, s.hidden, s.eps,
                 run.threads);
  }
  return kOk;
}

int check_rows(const Batch& b) {
  for (int64_t i = 0; i < b.num_rows; i++) {
    if (b.rows[i] < 0 || b.rows[i] >= b.tokens) return kBadRow;
  }
  return b.starts[b.num_seqs] == b.tokens ? kOk : kBadSequence;
}

int run_decoder(const Decoder& decoder, const Batch& batch, float* residual, float* out,
                int threads) {
  const DecoderShape& s = decoder.shape;
  const int64_t q = s.q_heads * s.head_size, qkv = q + 2 * s.kv_heads * s.head_size;
  const int64_t kept = std::max<int64_t>(0, batch.num_rows);
  const int64_t mlp_rows = std::min(std::max(batch.tokens, kept), kMlpRows);
  Layout layout;
  const size_t x = layout.add(batch.tokens * s.hidden * sizeof(float));
  const size_t all = layout.add(batch.tokens * qkv * sizeof(float));
  const size_t attention = layout.add(batch.tokens * q * sizeof(float));
  const size_t gated = layout.add(mlp_rows * 2 * s.inner * sizeof(float));
  const size_t inner = layout.add(mlp_rows * s.inner * sizeof(float));
  const size_t kept_x = layout.add(kept * s.hidden * sizeof(float));
  const size_t kept_residual = layout.add(kept * s.hidden * sizeof(float));
  char* base = Scratch::get(2, layout.total());
  auto at = [&](size_t offset) { return reinterpret_cast<float*>(base + offset); };
  Run run{decoder,   batch,         threads,   residual,  at(x),      at(all),
          at(attention), at(gated), at(inner), at(kept_x), at(kept_residual), qkv, q};
  // Everything that can be refused is, before the first byte of any cache is written.
  int wrong = check_rows(batch);
  for (const DecoderLayer& layer : decoder.layers) {
    if (layer.group >= batch.num_groups) return kBadSequence;
  }
  for (int64_t group = 0; group < batch.num_groups && !wrong; group++) {
    for (const DecoderLayer& layer : decoder.layers) {
      if (layer.group != group) continue;
      wrong = check_rope(rope_of(run, layer));
      if (!wrong) wrong = check_attention(attention_of(run, layer));
      break;
    }
  }
  return wrong ? wrong : run_layers(run, out);
}

}  // namespace
}  // namespace quire

using namespace quire;

extern "C" void* quire_decoder_new(const DecoderShape* shape, const DecoderLayer* layers,
                                   int64_t count, const float* final_norm) {
  try {
    return new Decoder{*shape, std::vector<DecoderLayer>(layers, layers + count), final_norm};
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

extern "C" void quire_decoder_free(void* decoder) { delete static_cast<Decoder*>(decoder); }

// residual [tokens, hidden]: the embeddings, overwritten; out [num_rows, hidden], or all tokens
// when num_rows is -1.
extern "C" int quire_decoder_run(const void* decoder, float* out, float* residual, int64_t tokens,
                                 const int64_t* positions, const DecoderGroup* groups,
                                 int64_t num_groups, const int32_t* seq_lens,
                                 const int32_t* starts, int64_t num_seqs,
                                 const int64_t* rows, int64_t num_rows, int threads) {
  const Batch batch{tokens, positions, groups, num_groups, seq_lens, starts, num_seqs, rows,
                    num_rows};
  return guarded([&] {
    return run_decoder(*static_cast<const Decoder*>(decoder), batch, residual, out, threads);
  });
}
