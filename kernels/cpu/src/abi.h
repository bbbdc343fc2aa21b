// The interface between Python and C++: structs that Python fills in, and the library's functions.
//
// `python -m tools.abi` writes kernels/cpu/abi.py and abi_layout.h from this file. So it is plain C
// outside of `#ifdef __cplusplus`, with structs in the order of their use and integers of explicit
// size. Functions that return int return kOk or another Status of runtime.h, unless noted
// otherwise.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
namespace quire {
#endif

struct Packed;
struct Decoder;

// The activation between an MLP's products.
struct Activation {
  int kind;
  float limit, alpha;  // kSwigluClamped: the limit of both halves; the second half gets + 1
};

struct Norm {
  const float *weight, *bias;  // null for 1 and 0; RMS requires a weight
  int64_t kind;
};

// LayerNorm of each head.
struct HeadNorm {
  const float *weight, *bias;  // [heads or 1, head_size], [head_size] or null; no weight means no
                               // norm
  int64_t stride;              // from a head's weight to the next one's: head_size or 0
};

// Blocks of tokens that a query sees, see kernels/attention_args.py; block 0 means all tokens.
struct Sparse {
  int64_t block, local, stride, head_step;
#ifdef __cplusplus
  bool shows(int64_t head, int64_t query, int64_t key) const;
#endif
};

// kernels/attention_args.py describes the fields.
struct AttentionArgs {
  const void* q;
  void* out;         // [tokens, q_heads, head_size], dense
  int64_t q_stride;  // elements from token to token
  int64_t tokens, q_heads, kv_heads, head_size;
  const void *key_cache, *value_cache;     // [num_blocks, kv_heads, block_size, head_size]
  // int8: [num_blocks, kv_heads, block_size]; e4m3 and e5m2: [kv_heads], or null for 1; else null
  const float *key_scales, *value_scales;
  int64_t num_blocks, block_size;
  const int32_t* block_tables;  // [num_seqs, table_stride]
  int64_t table_stride;
  const int32_t *seq_lens, *starts;
  int64_t num_seqs;
  const float *alibi, *sinks;  // [q_heads] or null
  int64_t window;              // 0 for none
  Sparse sparse;
  float scale, soft_cap;       // soft_cap 0 for none
  int32_t dtype, cache_dtype;
  const int64_t* rows;  // of the tokens whose results are needed, in any order
  int64_t num_rows;     // -1 for all
  int32_t round_inputs; // queries and weights may be rounded to bfloat16
  const int32_t* visible_ends;  // [tokens], or null: no query sees later tokens
  const float* distance_bias;   // [q_heads, num_distances], or null
  int64_t num_distances;
  void* ranks;  // the rank group whose ranks each have `block_size` tokens of a block; or null
#ifdef __cplusplus
  // Whether to multiply pairs of bfloat16: only if this loses no bits of keys and values, and no
  // pair spans two blocks.
  bool in_pairs() const;
  // Whether any token of [from, to) is needed; the results of others may be omitted.
  bool wants(int64_t from, int64_t to) const;
  int64_t group() const;
  int64_t padded() const;
  int64_t queries(int64_t seq) const;
  // Tokens of a block, of which the caches have `block_size`.
  int64_t table_size() const;
  // Whether the caches have a token.
  bool has(int64_t token) const;
  // The first token that a query at `position` sees.
  int64_t first_seen(int64_t position) const;
  // Index of a token's row of head_size values in either cache.
  int64_t row(int64_t seq, int64_t head, int64_t token) const;
#endif
};

// kernels/interface.py describes the fields.
struct RopeArgs {
  void *q, *k;
  const void* v;
  int64_t q_stride, k_stride, v_stride;  // elements from token to token
  int64_t tokens, q_heads, kv_heads, head_size;
  const int64_t* positions;
  const float* cos_sin;  // [max_position, rotary]; null for no rotation
  int64_t max_position, rotary;
  void *key_cache, *value_cache;
  float *key_scales, *value_scales;  // see AttentionArgs
  int64_t num_blocks, block_size;
  const int64_t* slots;
  const void *q_norm, *k_norm;  // null for no norm
  float eps;
  int32_t norm_dtype, neox, dtype, cache_dtype;
};

struct Experts {
  int64_t hidden, count, top_k, inner, shared_inner;
  int64_t groups, top_groups;     // of consecutive experts, and the number that a token may use
  int64_t group_best;             // 1 or 2: a group's score is the sum of this many of its best
  const Packed* router;           // [count, hidden]
  const Packed* const* gate_up;   // [count] of [2 inner, hidden]
  const Packed* const* down;      // [count] of [hidden, inner]
  const Packed *shared_gate_up, *shared_down;  // the expert of all tokens, or null
  const Packed* shared_gate;      // its sigmoid [1, hidden], or null
  const float* choice_bias;       // [count], added to scores only to choose experts, or null
  int32_t softmax_first;          // softmax over all experts before the choice, else over the
                                  // chosen ones
  int32_t sigmoid;                // sigmoid of each score instead of a softmax
  int32_t renormalize;            // divide the chosen weights by their sum
  float scale;                    // multiplies the chosen weights
  Activation act;
  void* ranks;                    // the rank group that shares the experts; null if all are here
  const int32_t* owners;          // [count, copies], the ranks that have an expert, then -1; the
                                  // pointers of experts elsewhere are null
  int64_t copies;
  int64_t* loads;                 // [count], tokens routed to each expert so far, with ranks
  int32_t row_ranks;  // as many consecutive ranks have the same rows, others theirs; 0: all ranks
};

// An adapter's addition to consecutive columns of y: (x A^T)[start, start + rank) times B^T.
struct LoraPart {
  const void* b;           // see pack_outputs
  int64_t first, columns;  // of y
  int64_t start, rank;     // rows of A; rank 0 adds nothing
  float scale;             // multiplies the addition
};

// An adapter of one linear layer: y = gain * (y + additions) + shift.
struct LoraLinear {
  const void* a;  // [rank / kLoraRanks, rounded up][lora_depth(k) / kLoraLanes][ranks][kLoraLanes]
  int64_t n, rank, k;
  const LoraPart* parts;
  int64_t num_parts;
  const float *gain, *shift;  // [n] or null for 1 and 0; only columns of a part change
  int32_t dtype;              // of a and b
  int32_t pairs;              // bf16: x and h are rounded, and b has pairs of ranks
};

// An adapter of one decoder layer; null where it doesn't change a linear layer.
struct LoraLayer {
  const LoraLinear *qkv, *o, *up, *down;
  const LoraLinear *router, *shared_up, *shared_down, *shared_gate;
  const LoraLinear *state_in, *state_selection, *state_rates, *state_gates, *state_out;
  const LoraLinear *const *expert_ups, *const *expert_downs;  // by expert, or null
};

// The rows of a step with one adapter, in ascending order.
struct LoraGroup {
  const LoraLayer* layers;
  const int64_t* rows;
  int64_t count;
};

// Rows of one linear layer's x and y with one adapter.
struct LoraUse {
  const LoraLinear* linear;
  const int64_t* rows;
  int64_t count;
};

// Moves A's rows [first, first + count) of `rank` from a file to their place.
struct LoraInputs {
  int64_t from, to;  // values; `to`: the beginning of A
  int64_t rank, first, count, k;
};

// Moves a part's B, [columns, rank] in the file, to its place.
struct LoraOutputs {
  int64_t from, to;
  int64_t columns, rank, pairs;
};

struct DecoderShape {
  int64_t hidden, q_heads, kv_heads, head_size, inner;
  int64_t num_blocks, block_size;
  int64_t max_position, rotary;
  float eps, scale, soft_cap, residual_scale;
  int32_t cache_dtype, neox, gated, parallel, round_inputs;
  Activation act;
  float clip_qkv;  // 0 for none
  float attention_output_scale, mlp_gate_scale, mlp_output_scale;
  int32_t attention_output_gate;  // each head's query is followed by a gate of its output
  int32_t normed_residual;        // what a norm gave becomes the residual, by the factors of layers
  float attention_residual, state_residual, mlp_residual;  // with attention, a state, of the MLP
  void* ranks;  // the rank group whose ranks each have an equal part of a block's tokens; or null
};

// A layer with a state instead of attention or beside it: see kernels/ssm.py, and mixers.cpp for the
// kinds.
struct StateLayer {
  const Packed *inputs, *output;      // from the hidden state, and from the heads' outputs
  const Packed *selection, *rates;    // Mamba 1: from the convolution's result to the inputs of
                                      // `rates`, keys and queries; delta rules: `rates` alone; or null
  const Packed* gates;                // KDA: the projection of the gates' inputs, or null
  Norm rates_norm, key_norm, query_norm;  // of the outputs of `selection`
  const float* input_scales;          // of the outputs of `inputs`, or null
  const Packed* const* head_gates;    // RG-LRU: of each head's input gates, then recurrence gates
  const float* gate_biases;           // [heads, 2 value_size] of them, or null
  const float *conv, *conv_bias;      // [width, channels], [channels] or null
  const float *decay, *rate_bias, *skip;  // [heads], Mamba 1's decay and KDA's bias [heads,
                                          // key_size], RG-LRU's decay [channels]; skip may be null;
                                          // all null without a scan
  const float* norm;                  // Mamba 2: [heads * value_size], normed in groups by key head;
                                      // delta rules: [value_size]; lightning: [heads * value_size];
                                      // or null
  float* conv_states;                 // [num_blocks, width - 1, channels]
  void* scan_states;                  // [num_blocks, heads, value_size, key_size]
  float* scan_scales;                 // for int8 [num_blocks, heads, value_size], otherwise null
  int64_t num_blocks, heads, key_heads, value_size, key_size, width, channels;
  float least_rate, most_rate, output_scale, eps;
  int32_t kind, norm_before_gate, states_dtype;
};

// Attention over latents: see engine/models/layers/mla.py. A query has `rest` values, and `rotary`
// ones that are rotated; a cached token the rotated key, then the latent.
struct LatentLayer {
  const Packed* inputs;    // to the queries or their latent, to the latent and the rotated key
  const Packed* queries;   // from the queries' latent, or null
  const float *query_norm, *latent_norm;  // RMS; query_norm null without a latent of queries
  const Packed* const* into;    // [heads], from the rest of a query to the latents' space
  const Packed* const* out_of;  // [heads], from latents to values
  int64_t latent, rotary, rest, value_size;
  float eps;
};

// A block between the residual and a layer's state, over the residual beside the embedding. Its
// attention is the layer's.
struct SharedBlock {
  Norm attention_norm, mlp_norm, mixer_norm;  // mixer_norm: of the state's input
  const Packed *gate_up, *down, *output;
  LoraLayer added;  // to qkv and gate_up for this layer alone
};

// A layer: attention, a state, both or neither; an MLP, experts or neither.
struct DecoderLayer {
  Norm input_norm;
  const Packed* qkv;                       // null for no attention
  const float *q_norm, *k_norm;            // RMS of heads, [head_size] or null
  const float *q_full_norm, *k_full_norm;  // RMS of all heads together, or null
  HeadNorm q_head_norm, k_head_norm;
  const float* cos_sin;                // [max_position, rotary] or null
  void *key_cache, *value_cache;
  float *key_scales, *value_scales;    // see AttentionArgs
  int64_t window;
  Sparse sparse;
  const float *alibi, *sinks;          // [q_heads] or null
  const Packed* o;
  Norm attention_out_norm;             // norm of attention's output before it is added to the
                                       // residual
  Norm mlp_norm;                       // parallel: kNoNorm to use attention's input
  const Packed *gate_up, *down;        // or null
  const Experts* experts;              // instead of both; or null
  Norm mlp_out_norm;                   // norm of the MLP's output before it is added to the
                                       // residual
  int64_t group;                       // selects the slots and block table of this layer
  const StateLayer* state;             // or null
  const LatentLayer* latents;          // of attention over latents, which has no qkv; or null
  const SharedBlock* shared;           // or null
};

// Where the layers of one group store the step's tokens, and find earlier ones.
struct DecoderGroup {
  const int64_t* slots;         // [tokens]
  const int32_t* block_tables;  // [num_seqs, table_stride]
  int64_t table_stride;
};

struct StepEnds {
  const Decoder* decoder;
  const Packed *embedding, *head;
  const float* positions;  // [num_positions, hidden], added to the embeddings; or null
  int64_t num_positions, position_offset;
  float embedding_scale, logit_scale;
  const int64_t* taps;  // layers, ascending, whose inputs a step returns; or null
  int64_t num_taps;
};

// The block table of one KV cache group.
struct BlockTable {
  const int32_t* blocks;  // [num_rows, stride]
  int64_t stride;
};

struct StepTables {
  int32_t* tokens;  // [num_rows, token_stride]
  int64_t token_stride;
  const BlockTable* block_tables;  // [num_groups]
  int64_t num_groups;
  const int64_t* num_prompt;           // [num_rows]
  int64_t *num_tokens, *num_computed;  // [num_rows]
  const int64_t* rope_offsets;         // [num_rows], added to positions for rotary embedding
  int64_t num_rows;
  const int32_t* state_blocks;  // [num_rows], each sequence's block of states; or null
  int64_t* state_tokens;        // [num_state_blocks], number of tokens in each state, -1 during a
                                // step
  int64_t num_state_blocks;
};

// Edits in the order in which they are applied. Ids are those of the vocabulary; a biased id occurs
// once.
struct RowEdits {
  const int32_t* allowed;    // bits of the allowed tokens; null for all
  const int32_t* forbidden;  // [num_forbidden]
  int64_t num_forbidden;
  // Bad words of two or more tokens, concatenated; word i begins at word_starts[i].
  const int32_t* words;
  const int64_t* word_starts;  // [num_words + 1]
  int64_t num_words;
  const int32_t* ends;  // [num_ends], forbidden before there are min_tokens
  int64_t num_ends, min_tokens;
  const int32_t* biased;  // [num_biased]
  const float* biases;
  int64_t num_biased;
  float repetition, frequency, presence;  // 1, 0, 0 for no penalty
  int32_t counts_prompt;                  // for the repetition penalty
  int64_t num_logprobs;                   // number of top tokens to report besides the chosen one;
                                          // -1 for no report
#ifdef __cplusplus
  bool penalises() const;
  bool changes() const;
#endif
};

// For each row of the step; without temperatures every row takes the most likely token.
struct StepChoice {
  const float* temperature;
  const int64_t* top_k;
  const double *top_p, *min_p;
  const uint64_t* seeds;
  const RowEdits* edits;  // null for no edits
};

// The results of a step.
struct StepResult {
  int64_t* out;  // by token of the rows with a choice: the next token, or -1
  int64_t* got;  // by row: number of new tokens; or null
  float* open;   // by token of the other rows: its logits
  // By token of the rows with a choice, as `Told`, if the row's edits request it.
  int64_t* ids;  // [tokens, 1 + the largest num_logprobs]
  float* values;
  int64_t* ranks;
  int64_t most;
  // [tokens of all rows, hidden], the output layer's input; with taps [.., num_taps * hidden], the
  // inputs of those layers; or null
  float* hidden;
};

// The sequences of a call: sequence i has tokens [starts[i], starts[i + 1]) and state rows[i].
struct StateRows {
  const int32_t* starts;
  const int64_t* rows;
  const int64_t* saves;  // [num_saves, 2]: the number of tokens before a save, and its row
  int64_t num_seqs, tokens, num_rows, num_saves;
};

struct CausalConv {
  float* out;      // [tokens, channels]
  const float* x;  // `stride` elements from token to token
  int64_t stride, channels, width;
  float* states;  // [num_rows, width - 1, channels]: each sequence's last inputs
  const float *weight, *bias;  // [width, channels], [channels] or null
  int32_t silu;  // apply SiLU to each sum
  StateRows of;
};

struct LinearScan {
  float* out;  // [tokens, heads, value_size]
  const float *q, *k, *v, *rate, *beta;  // beta null: the rate is used instead
  int64_t q_stride, k_stride, v_stride, rate_stride, beta_stride;  // from token to token
  const float *decay, *rate_bias, *skip;  // [heads]; skip may be null
  void* states;  // [num_rows, heads, value_size, key_size], float32, bfloat16 or int8
  float* state_scales;  // for int8 [num_rows, heads, value_size], otherwise null
  int64_t heads, key_heads, value_size, key_size;
  float least_rate, most_rate;
  int32_t delta;
  int32_t decay_by_key;  // decay is [heads, key_size]
  int32_t rate_by_key;   // rate_bias and a token's rates are [heads, key_size]; beta isn't null
  int32_t states_dtype;
  StateRows of;
};

struct DiagonalScan {
  float* out;              // [tokens, channels]
  const float *x, *decay;  // [tokens, channels]
  float* states;           // [num_rows, channels]
  int64_t channels;
  StateRows of;
};

// kernels/ssm.py, `lru_inputs`.
struct LruInputs {
  float *inputs, *decays;  // [tokens, heads * size]
  const float *x, *gates;  // [tokens, heads * size], [tokens, heads, 2 size]
  const float *biases, *decay;  // [heads, 2 size], [heads * size]
  const int64_t* positions;     // [tokens]
  int64_t tokens, heads, size;
};

struct SelectTokens {
  int64_t* out;           // [rows, top_k], ascending
  const float* queries;   // [rows, heads, size]
  const float* factors;   // [rows, heads]
  const float* keys;      // [size, num_keys]
  const int64_t* visible; // [rows], the number of keys that a row chooses from
  int64_t rows, heads, size, num_keys, top_k;
  float scale;
};

#ifdef __cplusplus
}  // namespace quire

// Sources that define these include this file, so that the compiler rejects differences.
using namespace quire;
extern "C" {
#endif

int quire_gate_and_mul(void* out, const void* x, int64_t rows, int64_t width, int kind, int dtype,
                       int threads);

int quire_activate(void* out, const void* x, int64_t rows, int64_t width, int kind, int dtype,
                   int threads);

int quire_paged_attention(const AttentionArgs* args, int threads);

int quire_read_memory(const void* p, int64_t bytes, int threads);
int quire_multiply(int64_t pieces, int threads);

void* quire_decoder_new(const DecoderShape* shape, const DecoderLayer* layers, int64_t count, const
                        Norm* final_norm);
void quire_decoder_free(void* decoder);
int quire_decoder_run(const void* decoder, float* out, float* residual, int64_t tokens, const
                      int64_t* positions, const DecoderGroup* groups, int64_t num_groups, const
                      int32_t* seq_lens, const int32_t* starts, int64_t num_seqs, const int64_t*
                      rows, int64_t num_rows, const LoraGroup* adapters, int64_t num_adapters, const
                      int64_t* taps, int64_t num_taps, float* tapped, const StateRows* states, int
                      threads);

int quire_run_experts(const void* experts, float* out, const float* x, int64_t rows, const
                      LoraGroup* groups, int64_t num_groups, int threads);

int quire_linear(const void* packed, void* out, const void* x, int64_t stride, int64_t rows, int
                 dtype, int threads);

int quire_linear_heads(const void* const* layers, int64_t heads, void* out, int64_t out_stride,
                       int64_t out_head, const void* x, int64_t x_stride, int64_t x_head, int64_t
                       rows, int dtype, int threads);

void* quire_pack_new(int format, int64_t n, int64_t k, int64_t group, const float* bias, int
                     round_inputs, const float* table, const int32_t* order);
int quire_pack_rows(void* packed, int64_t first, int64_t rows, const void* weight, int64_t
                    row_stride, int dtype, int threads);
int quire_pack_quantized_rows(void* packed, int64_t first, int64_t rows, const void* weight, int64_t
                              row_stride, int dtype, int threads);
int quire_pack_integer_rows(void* packed, int64_t first, int64_t rows, const int8_t* q, const float*
                            scales, const float* minima, int threads);
int quire_pack_float8_rows(void* packed, int64_t first, int64_t rows, const uint8_t* codes, const
                           float* scales, int threads);
void quire_free_packed(void* packed);
int64_t quire_packed_bytes(const void* packed);

int quire_linear_rows(const void* packed, float* out, const int64_t* ids, int64_t count, int
                      threads);

int64_t quire_ranks_bytes(int size, int64_t slot_bytes);
void* quire_ranks_new(void* shared, int rank, int size, int64_t slot_bytes, int64_t timeout_ms,
                      void* exchange);
void quire_ranks_free(void* group);
void quire_ranks_fail(void* group);
void quire_ranks_reset(void* group);
void quire_ranks_forget_failure(void* group);
int quire_ranks_listen(void* group);
void quire_ranks_interrupt(void* group);
int64_t quire_ranks_waited_ns(const void* group);
int quire_ranks_missing(const void* group);
int64_t quire_ranks_gathers(const void* group);
int quire_ranks_gather(void* group, float* out, const float* local, int64_t rows, const int64_t*
                       starts, int threads);
int quire_shard_linear(void* packed, void* group, const int64_t* outputs, const int64_t* inputs);

int quire_add_lora(float* y, int64_t n, const float* x, int64_t stride, int64_t rows, const LoraUse*
                   uses, int64_t num_uses, int threads);

int quire_pack_lora_outputs(void* out, const void* b, int64_t columns, int64_t rank, int pairs, int
                            size);
int quire_pack_lora_inputs(void* out, const void* a, int64_t rank, int64_t k, int size);
int quire_fill_lora(void* out, const void* values, const LoraInputs* inputs, int64_t num_inputs,
                    const LoraOutputs* outputs, int64_t num_outputs, int size);
int quire_all_numbers(const void* values, int64_t count, int dtype);
void* quire_allocate_lora(int64_t bytes);
void quire_free_lora(void* memory);

int quire_rms_norm(void* out, const void* x, const void* weight, int64_t rows, int64_t width, float
                   eps, int dtype, int weight_dtype, int threads);
int quire_add_rms_norm(void* out, const void* x, void* residual, const void* weight, int64_t rows,
                       int64_t width, float eps, int dtype, int weight_dtype, int threads);

int quire_bind_threads(const int* cpus, int count);

int quire_rope_and_cache(const RopeArgs* args, int threads);

// The instruction set and the extras of this build.
int quire_vector_bits(void);
int quire_has_bf16(void);
int quire_has_vnni(void);
void quire_map_pages(void* memory, int64_t bytes);
// Does nothing, to measure the cost of a call.
int quire_nothing(const void* a, const void* b, int64_t c, int64_t d, float e, int f);

int quire_argmax(int64_t* out, const float* logits, int64_t rows, int64_t vocab, int threads);
int quire_sample(int64_t* out, const float* logits, int64_t rows, int64_t vocab, const float*
                 temperature, const int64_t* top_k, const double* top_p, const double* min_p, const
                 double* uniforms, int threads);
int quire_top_logprobs(int64_t* ids, float* values, int64_t* ranks, float* normalizers, const float*
                       logits, int64_t rows, int64_t vocab, const int64_t* tokens, int64_t k, int
                       threads);

int quire_causal_conv(const CausalConv* c, int threads);
int quire_linear_scan(const LinearScan* s, int threads);
int quire_diagonal_scan(const DiagonalScan* s, int threads);
int quire_lru_inputs(const LruInputs* l, int threads);

int quire_select_tokens(const SelectTokens* s, int threads);

void* quire_step_new(const StepEnds* ends, const StepTables* tables);
void quire_step_free(void* step);
int quire_step_run(const void* step, const int64_t* rows, const int64_t* drafts, int64_t count,
                   int64_t chosen, const StepChoice* choice, const StepResult* result, const
                   LoraGroup* adapters, int64_t num_adapters, int threads);

#ifdef __cplusplus
}

#include "abi_layout.h"
#endif
