// How the compiler laid out each struct that Python fills in; kernels/cpu/abi.py compares its own.
#include <string>
#include <type_traits>

#include "states.h"
#include "step.h"

namespace quire {
namespace {

// One line a struct, "Name size", and one a field, "Name.field offset size kind".
class Listing {
 public:
  void open(const char* name, size_t size) {
    name_ = name;
    text_ += name_ + " " + std::to_string(size) + "\n";
  }
  template <class T>
  void field(const char* name, size_t offset) {
    const char* kind = std::is_pointer<T>::value          ? "pointer"
                       : std::is_floating_point<T>::value ? "float"
                       : std::is_class<T>::value          ? "struct"
                                                          : "integer";
    text_ += name_ + "." + name + " " + std::to_string(offset) + " " + std::to_string(sizeof(T)) +
             " " + kind + "\n";
  }
  const std::string& text() const { return text_; }

 private:
  std::string name_, text_;
};

#define QUIRE_OPEN(T) \
  using Struct = T;   \
  listing.open(#T, sizeof(T))
#define QUIRE_FIELD(name) listing.field<decltype(Struct::name)>(#name, offsetof(Struct, name))

void list_activation(Listing& listing) {
  QUIRE_OPEN(Activation);
  QUIRE_FIELD(kind);
  QUIRE_FIELD(limit);
  QUIRE_FIELD(alpha);
}

void list_norm(Listing& listing) {
  QUIRE_OPEN(Norm);
  QUIRE_FIELD(weight);
  QUIRE_FIELD(bias);
  QUIRE_FIELD(kind);
}

void list_head_norm(Listing& listing) {
  QUIRE_OPEN(HeadNorm);
  QUIRE_FIELD(weight);
  QUIRE_FIELD(bias);
  QUIRE_FIELD(stride);
}

void list_sparse(Listing& listing) {
  QUIRE_OPEN(Sparse);
  QUIRE_FIELD(block);
  QUIRE_FIELD(local);
  QUIRE_FIELD(stride);
  QUIRE_FIELD(head_step);
}

void list_attention_args(Listing& listing) {
  QUIRE_OPEN(AttentionArgs);
  QUIRE_FIELD(q);
  QUIRE_FIELD(out);
  QUIRE_FIELD(q_stride);
  QUIRE_FIELD(tokens);
  QUIRE_FIELD(q_heads);
  QUIRE_FIELD(kv_heads);
  QUIRE_FIELD(head_size);
  QUIRE_FIELD(key_cache);
  QUIRE_FIELD(value_cache);
  QUIRE_FIELD(key_scales);
  QUIRE_FIELD(value_scales);
  QUIRE_FIELD(num_blocks);
  QUIRE_FIELD(block_size);
  QUIRE_FIELD(block_tables);
  QUIRE_FIELD(table_stride);
  QUIRE_FIELD(seq_lens);
  QUIRE_FIELD(starts);
  QUIRE_FIELD(num_seqs);
  QUIRE_FIELD(alibi);
  QUIRE_FIELD(sinks);
  QUIRE_FIELD(window);
  QUIRE_FIELD(sparse);
  QUIRE_FIELD(scale);
  QUIRE_FIELD(soft_cap);
  QUIRE_FIELD(dtype);
  QUIRE_FIELD(cache_dtype);
  QUIRE_FIELD(rows);
  QUIRE_FIELD(num_rows);
}

void list_rope_args(Listing& listing) {
  QUIRE_OPEN(RopeArgs);
  QUIRE_FIELD(q);
  QUIRE_FIELD(k);
  QUIRE_FIELD(v);
  QUIRE_FIELD(q_stride);
  QUIRE_FIELD(k_stride);
  QUIRE_FIELD(v_stride);
  QUIRE_FIELD(tokens);
  QUIRE_FIELD(q_heads);
  QUIRE_FIELD(kv_heads);
  QUIRE_FIELD(head_size);
  QUIRE_FIELD(positions);
  QUIRE_FIELD(cos_sin);
  QUIRE_FIELD(max_position);
  QUIRE_FIELD(rotary);
  QUIRE_FIELD(key_cache);
  QUIRE_FIELD(value_cache);
  QUIRE_FIELD(key_scales);
  QUIRE_FIELD(value_scales);
  QUIRE_FIELD(num_blocks);
  QUIRE_FIELD(block_size);
  QUIRE_FIELD(slots);
  QUIRE_FIELD(q_norm);
  QUIRE_FIELD(k_norm);
  QUIRE_FIELD(eps);
  QUIRE_FIELD(norm_dtype);
  QUIRE_FIELD(neox);
  QUIRE_FIELD(dtype);
  QUIRE_FIELD(cache_dtype);
}

void list_experts(Listing& listing) {
  QUIRE_OPEN(Experts);
  QUIRE_FIELD(hidden);
  QUIRE_FIELD(count);
  QUIRE_FIELD(top_k);
  QUIRE_FIELD(inner);
  QUIRE_FIELD(shared_inner);
  QUIRE_FIELD(groups);
  QUIRE_FIELD(top_groups);
  QUIRE_FIELD(group_best);
  QUIRE_FIELD(router);
  QUIRE_FIELD(gate_up);
  QUIRE_FIELD(down);
  QUIRE_FIELD(shared_gate_up);
  QUIRE_FIELD(shared_down);
  QUIRE_FIELD(shared_gate);
  QUIRE_FIELD(choice_bias);
  QUIRE_FIELD(softmax_first);
  QUIRE_FIELD(sigmoid);
  QUIRE_FIELD(renormalize);
  QUIRE_FIELD(scale);
  QUIRE_FIELD(act);
}

void list_decoder_shape(Listing& listing) {
  QUIRE_OPEN(DecoderShape);
  QUIRE_FIELD(hidden);
  QUIRE_FIELD(q_heads);
  QUIRE_FIELD(kv_heads);
  QUIRE_FIELD(head_size);
  QUIRE_FIELD(inner);
  QUIRE_FIELD(num_blocks);
  QUIRE_FIELD(block_size);
  QUIRE_FIELD(max_position);
  QUIRE_FIELD(rotary);
  QUIRE_FIELD(eps);
  QUIRE_FIELD(scale);
  QUIRE_FIELD(soft_cap);
  QUIRE_FIELD(residual_scale);
  QUIRE_FIELD(cache_dtype);
  QUIRE_FIELD(neox);
  QUIRE_FIELD(gated);
  QUIRE_FIELD(parallel);
  QUIRE_FIELD(act);
  QUIRE_FIELD(clip_qkv);
}

void list_decoder_layer(Listing& listing) {
  QUIRE_OPEN(DecoderLayer);
  QUIRE_FIELD(input_norm);
  QUIRE_FIELD(qkv);
  QUIRE_FIELD(q_norm);
  QUIRE_FIELD(k_norm);
  QUIRE_FIELD(q_full_norm);
  QUIRE_FIELD(k_full_norm);
  QUIRE_FIELD(q_head_norm);
  QUIRE_FIELD(k_head_norm);
  QUIRE_FIELD(cos_sin);
  QUIRE_FIELD(key_cache);
  QUIRE_FIELD(value_cache);
  QUIRE_FIELD(key_scales);
  QUIRE_FIELD(value_scales);
  QUIRE_FIELD(window);
  QUIRE_FIELD(sparse);
  QUIRE_FIELD(alibi);
  QUIRE_FIELD(sinks);
  QUIRE_FIELD(o);
  QUIRE_FIELD(attention_out_norm);
  QUIRE_FIELD(mlp_norm);
  QUIRE_FIELD(gate_up);
  QUIRE_FIELD(down);
  QUIRE_FIELD(experts);
  QUIRE_FIELD(mlp_out_norm);
  QUIRE_FIELD(group);
}

void list_decoder_group(Listing& listing) {
  QUIRE_OPEN(DecoderGroup);
  QUIRE_FIELD(slots);
  QUIRE_FIELD(block_tables);
  QUIRE_FIELD(table_stride);
}

void list_step_ends(Listing& listing) {
  QUIRE_OPEN(StepEnds);
  QUIRE_FIELD(decoder);
  QUIRE_FIELD(embedding);
  QUIRE_FIELD(head);
  QUIRE_FIELD(positions);
  QUIRE_FIELD(num_positions);
  QUIRE_FIELD(position_offset);
  QUIRE_FIELD(embedding_scale);
  QUIRE_FIELD(logit_scale);
  QUIRE_FIELD(taps);
  QUIRE_FIELD(num_taps);
}

void list_block_table(Listing& listing) {
  QUIRE_OPEN(BlockTable);
  QUIRE_FIELD(blocks);
  QUIRE_FIELD(stride);
}

void list_step_tables(Listing& listing) {
  QUIRE_OPEN(StepTables);
  QUIRE_FIELD(tokens);
  QUIRE_FIELD(token_stride);
  QUIRE_FIELD(block_tables);
  QUIRE_FIELD(num_groups);
  QUIRE_FIELD(num_prompt);
  QUIRE_FIELD(num_tokens);
  QUIRE_FIELD(num_computed);
  QUIRE_FIELD(num_rows);
}

void list_step_choice(Listing& listing) {
  QUIRE_OPEN(StepChoice);
  QUIRE_FIELD(temperature);
  QUIRE_FIELD(top_k);
  QUIRE_FIELD(top_p);
  QUIRE_FIELD(min_p);
  QUIRE_FIELD(seeds);
  QUIRE_FIELD(edits);
}

void list_step_result(Listing& listing) {
  QUIRE_OPEN(StepResult);
  QUIRE_FIELD(out);
  QUIRE_FIELD(got);
  QUIRE_FIELD(open);
  QUIRE_FIELD(ids);
  QUIRE_FIELD(values);
  QUIRE_FIELD(ranks);
  QUIRE_FIELD(most);
  QUIRE_FIELD(hidden);
}

void list_row_edits(Listing& listing) {
  QUIRE_OPEN(RowEdits);
  QUIRE_FIELD(allowed);
  QUIRE_FIELD(forbidden);
  QUIRE_FIELD(num_forbidden);
  QUIRE_FIELD(words);
  QUIRE_FIELD(word_starts);
  QUIRE_FIELD(num_words);
  QUIRE_FIELD(ends);
  QUIRE_FIELD(num_ends);
  QUIRE_FIELD(min_tokens);
  QUIRE_FIELD(biased);
  QUIRE_FIELD(biases);
  QUIRE_FIELD(num_biased);
  QUIRE_FIELD(repetition);
  QUIRE_FIELD(frequency);
  QUIRE_FIELD(presence);
  QUIRE_FIELD(counts_prompt);
  QUIRE_FIELD(num_logprobs);
}

void list_lora_part(Listing& listing) {
  QUIRE_OPEN(LoraPart);
  QUIRE_FIELD(b);
  QUIRE_FIELD(first);
  QUIRE_FIELD(columns);
  QUIRE_FIELD(start);
  QUIRE_FIELD(rank);
  QUIRE_FIELD(scale);
}

void list_lora_linear(Listing& listing) {
  QUIRE_OPEN(LoraLinear);
  QUIRE_FIELD(a);
  QUIRE_FIELD(n);
  QUIRE_FIELD(rank);
  QUIRE_FIELD(k);
  QUIRE_FIELD(parts);
  QUIRE_FIELD(num_parts);
  QUIRE_FIELD(gain);
  QUIRE_FIELD(shift);
  QUIRE_FIELD(dtype);
  QUIRE_FIELD(pairs);
}

void list_lora_layer(Listing& listing) {
  QUIRE_OPEN(LoraLayer);
  QUIRE_FIELD(qkv);
  QUIRE_FIELD(o);
  QUIRE_FIELD(up);
  QUIRE_FIELD(down);
  QUIRE_FIELD(router);
  QUIRE_FIELD(shared_up);
  QUIRE_FIELD(shared_down);
  QUIRE_FIELD(shared_gate);
  QUIRE_FIELD(expert_ups);
  QUIRE_FIELD(expert_downs);
}

void list_lora_group(Listing& listing) {
  QUIRE_OPEN(LoraGroup);
  QUIRE_FIELD(layers);
  QUIRE_FIELD(rows);
  QUIRE_FIELD(count);
}

void list_lora_inputs(Listing& listing) {
  QUIRE_OPEN(LoraInputs);
  QUIRE_FIELD(from);
  QUIRE_FIELD(to);
  QUIRE_FIELD(rank);
  QUIRE_FIELD(first);
  QUIRE_FIELD(count);
  QUIRE_FIELD(k);
}

void list_lora_outputs(Listing& listing) {
  QUIRE_OPEN(LoraOutputs);
  QUIRE_FIELD(from);
  QUIRE_FIELD(to);
  QUIRE_FIELD(columns);
  QUIRE_FIELD(rank);
  QUIRE_FIELD(pairs);
}

void list_lora_use(Listing& listing) {
  QUIRE_OPEN(LoraUse);
  QUIRE_FIELD(linear);
  QUIRE_FIELD(rows);
  QUIRE_FIELD(count);
}

void list_state_rows(Listing& listing) {
  QUIRE_OPEN(StateRows);
  QUIRE_FIELD(starts);
  QUIRE_FIELD(rows);
  QUIRE_FIELD(num_seqs);
  QUIRE_FIELD(tokens);
  QUIRE_FIELD(num_rows);
}

void list_causal_conv(Listing& listing) {
  QUIRE_OPEN(CausalConv);
  QUIRE_FIELD(out);
  QUIRE_FIELD(x);
  QUIRE_FIELD(stride);
  QUIRE_FIELD(channels);
  QUIRE_FIELD(width);
  QUIRE_FIELD(states);
  QUIRE_FIELD(weight);
  QUIRE_FIELD(bias);
  QUIRE_FIELD(of);
}

void list_linear_scan(Listing& listing) {
  QUIRE_OPEN(LinearScan);
  QUIRE_FIELD(out);
  QUIRE_FIELD(q);
  QUIRE_FIELD(k);
  QUIRE_FIELD(v);
  QUIRE_FIELD(rate);
  QUIRE_FIELD(beta);
  QUIRE_FIELD(q_stride);
  QUIRE_FIELD(k_stride);
  QUIRE_FIELD(v_stride);
  QUIRE_FIELD(rate_stride);
  QUIRE_FIELD(beta_stride);
  QUIRE_FIELD(decay);
  QUIRE_FIELD(rate_bias);
  QUIRE_FIELD(skip);
  QUIRE_FIELD(states);
  QUIRE_FIELD(heads);
  QUIRE_FIELD(key_heads);
  QUIRE_FIELD(value_size);
  QUIRE_FIELD(key_size);
  QUIRE_FIELD(least_rate);
  QUIRE_FIELD(most_rate);
  QUIRE_FIELD(delta);
  QUIRE_FIELD(of);
}

std::string list_all() {
  Listing listing;
  list_activation(listing);
  list_norm(listing);
  list_head_norm(listing);
  list_sparse(listing);
  list_attention_args(listing);
  list_rope_args(listing);
  list_experts(listing);
  list_decoder_shape(listing);
  list_decoder_layer(listing);
  list_decoder_group(listing);
  list_step_ends(listing);
  list_block_table(listing);
  list_step_tables(listing);
  list_step_choice(listing);
  list_step_result(listing);
  list_row_edits(listing);
  list_lora_part(listing);
  list_lora_linear(listing);
  list_lora_layer(listing);
  list_lora_group(listing);
  list_lora_use(listing);
  list_lora_inputs(listing);
  list_lora_outputs(listing);
  list_state_rows(listing);
  list_causal_conv(listing);
  list_linear_scan(listing);
  return listing.text();
}

}  // namespace
}  // namespace quire

extern "C" const char* quire_structs() {
  static const std::string text = quire::list_all();
  return text.c_str();
}
