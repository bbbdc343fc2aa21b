// Where Python writes each field: `python -m tools.abi` writes this from abi.h.
#pragma once

#include <cstddef>

#define QUIRE_SIZE(T, size) \
  static_assert(sizeof(T) == size, "run python -m tools.abi")
#define QUIRE_OFFSET(T, field, offset) \
  static_assert(offsetof(T, field) == offset, "run python -m tools.abi")

namespace quire {

QUIRE_SIZE(Activation, 12);
QUIRE_OFFSET(Activation, kind, 0);
QUIRE_OFFSET(Activation, limit, 4);
QUIRE_OFFSET(Activation, alpha, 8);

QUIRE_SIZE(Norm, 24);
QUIRE_OFFSET(Norm, weight, 0);
QUIRE_OFFSET(Norm, bias, 8);
QUIRE_OFFSET(Norm, kind, 16);

QUIRE_SIZE(HeadNorm, 24);
QUIRE_OFFSET(HeadNorm, weight, 0);
QUIRE_OFFSET(HeadNorm, bias, 8);
QUIRE_OFFSET(HeadNorm, stride, 16);

QUIRE_SIZE(Sparse, 32);
QUIRE_OFFSET(Sparse, block, 0);
QUIRE_OFFSET(Sparse, local, 8);
QUIRE_OFFSET(Sparse, stride, 16);
QUIRE_OFFSET(Sparse, head_step, 24);

QUIRE_SIZE(AttentionArgs, 272);
QUIRE_OFFSET(AttentionArgs, q, 0);
QUIRE_OFFSET(AttentionArgs, out, 8);
QUIRE_OFFSET(AttentionArgs, q_stride, 16);
QUIRE_OFFSET(AttentionArgs, tokens, 24);
QUIRE_OFFSET(AttentionArgs, q_heads, 32);
QUIRE_OFFSET(AttentionArgs, kv_heads, 40);
QUIRE_OFFSET(AttentionArgs, head_size, 48);
QUIRE_OFFSET(AttentionArgs, key_cache, 56);
QUIRE_OFFSET(AttentionArgs, value_cache, 64);
QUIRE_OFFSET(AttentionArgs, key_scales, 72);
QUIRE_OFFSET(AttentionArgs, value_scales, 80);
QUIRE_OFFSET(AttentionArgs, num_blocks, 88);
QUIRE_OFFSET(AttentionArgs, block_size, 96);
QUIRE_OFFSET(AttentionArgs, block_tables, 104);
QUIRE_OFFSET(AttentionArgs, table_stride, 112);
QUIRE_OFFSET(AttentionArgs, seq_lens, 120);
QUIRE_OFFSET(AttentionArgs, starts, 128);
QUIRE_OFFSET(AttentionArgs, num_seqs, 136);
QUIRE_OFFSET(AttentionArgs, alibi, 144);
QUIRE_OFFSET(AttentionArgs, sinks, 152);
QUIRE_OFFSET(AttentionArgs, window, 160);
QUIRE_OFFSET(AttentionArgs, sparse, 168);
QUIRE_OFFSET(AttentionArgs, scale, 200);
QUIRE_OFFSET(AttentionArgs, soft_cap, 204);
QUIRE_OFFSET(AttentionArgs, dtype, 208);
QUIRE_OFFSET(AttentionArgs, cache_dtype, 212);
QUIRE_OFFSET(AttentionArgs, rows, 216);
QUIRE_OFFSET(AttentionArgs, num_rows, 224);
QUIRE_OFFSET(AttentionArgs, round_inputs, 232);
QUIRE_OFFSET(AttentionArgs, visible_ends, 240);
QUIRE_OFFSET(AttentionArgs, distance_bias, 248);
QUIRE_OFFSET(AttentionArgs, num_distances, 256);
QUIRE_OFFSET(AttentionArgs, ranks, 264);

QUIRE_SIZE(RopeArgs, 208);
QUIRE_OFFSET(RopeArgs, q, 0);
QUIRE_OFFSET(RopeArgs, k, 8);
QUIRE_OFFSET(RopeArgs, v, 16);
QUIRE_OFFSET(RopeArgs, q_stride, 24);
QUIRE_OFFSET(RopeArgs, k_stride, 32);
QUIRE_OFFSET(RopeArgs, v_stride, 40);
QUIRE_OFFSET(RopeArgs, tokens, 48);
QUIRE_OFFSET(RopeArgs, q_heads, 56);
QUIRE_OFFSET(RopeArgs, kv_heads, 64);
QUIRE_OFFSET(RopeArgs, head_size, 72);
QUIRE_OFFSET(RopeArgs, positions, 80);
QUIRE_OFFSET(RopeArgs, cos_sin, 88);
QUIRE_OFFSET(RopeArgs, max_position, 96);
QUIRE_OFFSET(RopeArgs, rotary, 104);
QUIRE_OFFSET(RopeArgs, key_cache, 112);
QUIRE_OFFSET(RopeArgs, value_cache, 120);
QUIRE_OFFSET(RopeArgs, key_scales, 128);
QUIRE_OFFSET(RopeArgs, value_scales, 136);
QUIRE_OFFSET(RopeArgs, num_blocks, 144);
QUIRE_OFFSET(RopeArgs, block_size, 152);
QUIRE_OFFSET(RopeArgs, slots, 160);
QUIRE_OFFSET(RopeArgs, q_norm, 168);
QUIRE_OFFSET(RopeArgs, k_norm, 176);
QUIRE_OFFSET(RopeArgs, eps, 184);
QUIRE_OFFSET(RopeArgs, norm_dtype, 188);
QUIRE_OFFSET(RopeArgs, neox, 192);
QUIRE_OFFSET(RopeArgs, dtype, 196);
QUIRE_OFFSET(RopeArgs, cache_dtype, 200);

QUIRE_SIZE(Experts, 192);
QUIRE_OFFSET(Experts, hidden, 0);
QUIRE_OFFSET(Experts, count, 8);
QUIRE_OFFSET(Experts, top_k, 16);
QUIRE_OFFSET(Experts, inner, 24);
QUIRE_OFFSET(Experts, shared_inner, 32);
QUIRE_OFFSET(Experts, groups, 40);
QUIRE_OFFSET(Experts, top_groups, 48);
QUIRE_OFFSET(Experts, group_best, 56);
QUIRE_OFFSET(Experts, router, 64);
QUIRE_OFFSET(Experts, gate_up, 72);
QUIRE_OFFSET(Experts, down, 80);
QUIRE_OFFSET(Experts, shared_gate_up, 88);
QUIRE_OFFSET(Experts, shared_down, 96);
QUIRE_OFFSET(Experts, shared_gate, 104);
QUIRE_OFFSET(Experts, choice_bias, 112);
QUIRE_OFFSET(Experts, softmax_first, 120);
QUIRE_OFFSET(Experts, sigmoid, 124);
QUIRE_OFFSET(Experts, renormalize, 128);
QUIRE_OFFSET(Experts, scale, 132);
QUIRE_OFFSET(Experts, act, 136);
QUIRE_OFFSET(Experts, ranks, 152);
QUIRE_OFFSET(Experts, owners, 160);
QUIRE_OFFSET(Experts, copies, 168);
QUIRE_OFFSET(Experts, loads, 176);
QUIRE_OFFSET(Experts, row_ranks, 184);

QUIRE_SIZE(LoraPart, 48);
QUIRE_OFFSET(LoraPart, b, 0);
QUIRE_OFFSET(LoraPart, first, 8);
QUIRE_OFFSET(LoraPart, columns, 16);
QUIRE_OFFSET(LoraPart, start, 24);
QUIRE_OFFSET(LoraPart, rank, 32);
QUIRE_OFFSET(LoraPart, scale, 40);

QUIRE_SIZE(LoraLinear, 72);
QUIRE_OFFSET(LoraLinear, a, 0);
QUIRE_OFFSET(LoraLinear, n, 8);
QUIRE_OFFSET(LoraLinear, rank, 16);
QUIRE_OFFSET(LoraLinear, k, 24);
QUIRE_OFFSET(LoraLinear, parts, 32);
QUIRE_OFFSET(LoraLinear, num_parts, 40);
QUIRE_OFFSET(LoraLinear, gain, 48);
QUIRE_OFFSET(LoraLinear, shift, 56);
QUIRE_OFFSET(LoraLinear, dtype, 64);
QUIRE_OFFSET(LoraLinear, pairs, 68);

QUIRE_SIZE(LoraLayer, 120);
QUIRE_OFFSET(LoraLayer, qkv, 0);
QUIRE_OFFSET(LoraLayer, o, 8);
QUIRE_OFFSET(LoraLayer, up, 16);
QUIRE_OFFSET(LoraLayer, down, 24);
QUIRE_OFFSET(LoraLayer, router, 32);
QUIRE_OFFSET(LoraLayer, shared_up, 40);
QUIRE_OFFSET(LoraLayer, shared_down, 48);
QUIRE_OFFSET(LoraLayer, shared_gate, 56);
QUIRE_OFFSET(LoraLayer, state_in, 64);
QUIRE_OFFSET(LoraLayer, state_selection, 72);
QUIRE_OFFSET(LoraLayer, state_rates, 80);
QUIRE_OFFSET(LoraLayer, state_gates, 88);
QUIRE_OFFSET(LoraLayer, state_out, 96);
QUIRE_OFFSET(LoraLayer, expert_ups, 104);
QUIRE_OFFSET(LoraLayer, expert_downs, 112);

QUIRE_SIZE(LoraGroup, 24);
QUIRE_OFFSET(LoraGroup, layers, 0);
QUIRE_OFFSET(LoraGroup, rows, 8);
QUIRE_OFFSET(LoraGroup, count, 16);

QUIRE_SIZE(LoraUse, 24);
QUIRE_OFFSET(LoraUse, linear, 0);
QUIRE_OFFSET(LoraUse, rows, 8);
QUIRE_OFFSET(LoraUse, count, 16);

QUIRE_SIZE(LoraInputs, 48);
QUIRE_OFFSET(LoraInputs, from, 0);
QUIRE_OFFSET(LoraInputs, to, 8);
QUIRE_OFFSET(LoraInputs, rank, 16);
QUIRE_OFFSET(LoraInputs, first, 24);
QUIRE_OFFSET(LoraInputs, count, 32);
QUIRE_OFFSET(LoraInputs, k, 40);

QUIRE_SIZE(LoraOutputs, 40);
QUIRE_OFFSET(LoraOutputs, from, 0);
QUIRE_OFFSET(LoraOutputs, to, 8);
QUIRE_OFFSET(LoraOutputs, columns, 16);
QUIRE_OFFSET(LoraOutputs, rank, 24);
QUIRE_OFFSET(LoraOutputs, pairs, 32);

QUIRE_SIZE(DecoderShape, 168);
QUIRE_OFFSET(DecoderShape, hidden, 0);
QUIRE_OFFSET(DecoderShape, q_heads, 8);
QUIRE_OFFSET(DecoderShape, kv_heads, 16);
QUIRE_OFFSET(DecoderShape, head_size, 24);
QUIRE_OFFSET(DecoderShape, inner, 32);
QUIRE_OFFSET(DecoderShape, num_blocks, 40);
QUIRE_OFFSET(DecoderShape, block_size, 48);
QUIRE_OFFSET(DecoderShape, max_position, 56);
QUIRE_OFFSET(DecoderShape, rotary, 64);
QUIRE_OFFSET(DecoderShape, eps, 72);
QUIRE_OFFSET(DecoderShape, scale, 76);
QUIRE_OFFSET(DecoderShape, soft_cap, 80);
QUIRE_OFFSET(DecoderShape, residual_scale, 84);
QUIRE_OFFSET(DecoderShape, cache_dtype, 88);
QUIRE_OFFSET(DecoderShape, neox, 92);
QUIRE_OFFSET(DecoderShape, gated, 96);
QUIRE_OFFSET(DecoderShape, parallel, 100);
QUIRE_OFFSET(DecoderShape, round_inputs, 104);
QUIRE_OFFSET(DecoderShape, act, 108);
QUIRE_OFFSET(DecoderShape, clip_qkv, 120);
QUIRE_OFFSET(DecoderShape, attention_output_scale, 124);
QUIRE_OFFSET(DecoderShape, mlp_gate_scale, 128);
QUIRE_OFFSET(DecoderShape, mlp_output_scale, 132);
QUIRE_OFFSET(DecoderShape, attention_output_gate, 136);
QUIRE_OFFSET(DecoderShape, normed_residual, 140);
QUIRE_OFFSET(DecoderShape, attention_residual, 144);
QUIRE_OFFSET(DecoderShape, state_residual, 148);
QUIRE_OFFSET(DecoderShape, mlp_residual, 152);
QUIRE_OFFSET(DecoderShape, ranks, 160);

QUIRE_SIZE(StateLayer, 296);
QUIRE_OFFSET(StateLayer, inputs, 0);
QUIRE_OFFSET(StateLayer, output, 8);
QUIRE_OFFSET(StateLayer, selection, 16);
QUIRE_OFFSET(StateLayer, rates, 24);
QUIRE_OFFSET(StateLayer, gates, 32);
QUIRE_OFFSET(StateLayer, rates_norm, 40);
QUIRE_OFFSET(StateLayer, key_norm, 64);
QUIRE_OFFSET(StateLayer, query_norm, 88);
QUIRE_OFFSET(StateLayer, input_scales, 112);
QUIRE_OFFSET(StateLayer, head_gates, 120);
QUIRE_OFFSET(StateLayer, gate_biases, 128);
QUIRE_OFFSET(StateLayer, conv, 136);
QUIRE_OFFSET(StateLayer, conv_bias, 144);
QUIRE_OFFSET(StateLayer, decay, 152);
QUIRE_OFFSET(StateLayer, rate_bias, 160);
QUIRE_OFFSET(StateLayer, skip, 168);
QUIRE_OFFSET(StateLayer, norm, 176);
QUIRE_OFFSET(StateLayer, conv_states, 184);
QUIRE_OFFSET(StateLayer, scan_states, 192);
QUIRE_OFFSET(StateLayer, scan_scales, 200);
QUIRE_OFFSET(StateLayer, num_blocks, 208);
QUIRE_OFFSET(StateLayer, heads, 216);
QUIRE_OFFSET(StateLayer, key_heads, 224);
QUIRE_OFFSET(StateLayer, value_size, 232);
QUIRE_OFFSET(StateLayer, key_size, 240);
QUIRE_OFFSET(StateLayer, width, 248);
QUIRE_OFFSET(StateLayer, channels, 256);
QUIRE_OFFSET(StateLayer, least_rate, 264);
QUIRE_OFFSET(StateLayer, most_rate, 268);
QUIRE_OFFSET(StateLayer, output_scale, 272);
QUIRE_OFFSET(StateLayer, eps, 276);
QUIRE_OFFSET(StateLayer, kind, 280);
QUIRE_OFFSET(StateLayer, norm_before_gate, 284);
QUIRE_OFFSET(StateLayer, states_dtype, 288);

QUIRE_SIZE(LatentLayer, 88);
QUIRE_OFFSET(LatentLayer, inputs, 0);
QUIRE_OFFSET(LatentLayer, queries, 8);
QUIRE_OFFSET(LatentLayer, query_norm, 16);
QUIRE_OFFSET(LatentLayer, latent_norm, 24);
QUIRE_OFFSET(LatentLayer, into, 32);
QUIRE_OFFSET(LatentLayer, out_of, 40);
QUIRE_OFFSET(LatentLayer, latent, 48);
QUIRE_OFFSET(LatentLayer, rotary, 56);
QUIRE_OFFSET(LatentLayer, rest, 64);
QUIRE_OFFSET(LatentLayer, value_size, 72);
QUIRE_OFFSET(LatentLayer, eps, 80);

QUIRE_SIZE(SharedBlock, 216);
QUIRE_OFFSET(SharedBlock, attention_norm, 0);
QUIRE_OFFSET(SharedBlock, mlp_norm, 24);
QUIRE_OFFSET(SharedBlock, mixer_norm, 48);
QUIRE_OFFSET(SharedBlock, gate_up, 72);
QUIRE_OFFSET(SharedBlock, down, 80);
QUIRE_OFFSET(SharedBlock, output, 88);
QUIRE_OFFSET(SharedBlock, added, 96);

QUIRE_SIZE(DecoderLayer, 344);
QUIRE_OFFSET(DecoderLayer, input_norm, 0);
QUIRE_OFFSET(DecoderLayer, qkv, 24);
QUIRE_OFFSET(DecoderLayer, q_norm, 32);
QUIRE_OFFSET(DecoderLayer, k_norm, 40);
QUIRE_OFFSET(DecoderLayer, q_full_norm, 48);
QUIRE_OFFSET(DecoderLayer, k_full_norm, 56);
QUIRE_OFFSET(DecoderLayer, q_head_norm, 64);
QUIRE_OFFSET(DecoderLayer, k_head_norm, 88);
QUIRE_OFFSET(DecoderLayer, cos_sin, 112);
QUIRE_OFFSET(DecoderLayer, key_cache, 120);
QUIRE_OFFSET(DecoderLayer, value_cache, 128);
QUIRE_OFFSET(DecoderLayer, key_scales, 136);
QUIRE_OFFSET(DecoderLayer, value_scales, 144);
QUIRE_OFFSET(DecoderLayer, window, 152);
QUIRE_OFFSET(DecoderLayer, sparse, 160);
QUIRE_OFFSET(DecoderLayer, alibi, 192);
QUIRE_OFFSET(DecoderLayer, sinks, 200);
QUIRE_OFFSET(DecoderLayer, o, 208);
QUIRE_OFFSET(DecoderLayer, attention_out_norm, 216);
QUIRE_OFFSET(DecoderLayer, mlp_norm, 240);
QUIRE_OFFSET(DecoderLayer, gate_up, 264);
QUIRE_OFFSET(DecoderLayer, down, 272);
QUIRE_OFFSET(DecoderLayer, experts, 280);
QUIRE_OFFSET(DecoderLayer, mlp_out_norm, 288);
QUIRE_OFFSET(DecoderLayer, group, 312);
QUIRE_OFFSET(DecoderLayer, state, 320);
QUIRE_OFFSET(DecoderLayer, latents, 328);
QUIRE_OFFSET(DecoderLayer, shared, 336);

QUIRE_SIZE(DecoderGroup, 24);
QUIRE_OFFSET(DecoderGroup, slots, 0);
QUIRE_OFFSET(DecoderGroup, block_tables, 8);
QUIRE_OFFSET(DecoderGroup, table_stride, 16);

QUIRE_SIZE(StepEnds, 72);
QUIRE_OFFSET(StepEnds, decoder, 0);
QUIRE_OFFSET(StepEnds, embedding, 8);
QUIRE_OFFSET(StepEnds, head, 16);
QUIRE_OFFSET(StepEnds, positions, 24);
QUIRE_OFFSET(StepEnds, num_positions, 32);
QUIRE_OFFSET(StepEnds, position_offset, 40);
QUIRE_OFFSET(StepEnds, embedding_scale, 48);
QUIRE_OFFSET(StepEnds, logit_scale, 52);
QUIRE_OFFSET(StepEnds, taps, 56);
QUIRE_OFFSET(StepEnds, num_taps, 64);

QUIRE_SIZE(BlockTable, 16);
QUIRE_OFFSET(BlockTable, blocks, 0);
QUIRE_OFFSET(BlockTable, stride, 8);

QUIRE_SIZE(StepTables, 96);
QUIRE_OFFSET(StepTables, tokens, 0);
QUIRE_OFFSET(StepTables, token_stride, 8);
QUIRE_OFFSET(StepTables, block_tables, 16);
QUIRE_OFFSET(StepTables, num_groups, 24);
QUIRE_OFFSET(StepTables, num_prompt, 32);
QUIRE_OFFSET(StepTables, num_tokens, 40);
QUIRE_OFFSET(StepTables, num_computed, 48);
QUIRE_OFFSET(StepTables, rope_offsets, 56);
QUIRE_OFFSET(StepTables, num_rows, 64);
QUIRE_OFFSET(StepTables, state_blocks, 72);
QUIRE_OFFSET(StepTables, state_tokens, 80);
QUIRE_OFFSET(StepTables, num_state_blocks, 88);

QUIRE_SIZE(RowEdits, 120);
QUIRE_OFFSET(RowEdits, allowed, 0);
QUIRE_OFFSET(RowEdits, forbidden, 8);
QUIRE_OFFSET(RowEdits, num_forbidden, 16);
QUIRE_OFFSET(RowEdits, words, 24);
QUIRE_OFFSET(RowEdits, word_starts, 32);
QUIRE_OFFSET(RowEdits, num_words, 40);
QUIRE_OFFSET(RowEdits, ends, 48);
QUIRE_OFFSET(RowEdits, num_ends, 56);
QUIRE_OFFSET(RowEdits, min_tokens, 64);
QUIRE_OFFSET(RowEdits, biased, 72);
QUIRE_OFFSET(RowEdits, biases, 80);
QUIRE_OFFSET(RowEdits, num_biased, 88);
QUIRE_OFFSET(RowEdits, repetition, 96);
QUIRE_OFFSET(RowEdits, frequency, 100);
QUIRE_OFFSET(RowEdits, presence, 104);
QUIRE_OFFSET(RowEdits, counts_prompt, 108);
QUIRE_OFFSET(RowEdits, num_logprobs, 112);

QUIRE_SIZE(StepChoice, 48);
QUIRE_OFFSET(StepChoice, temperature, 0);
QUIRE_OFFSET(StepChoice, top_k, 8);
QUIRE_OFFSET(StepChoice, top_p, 16);
QUIRE_OFFSET(StepChoice, min_p, 24);
QUIRE_OFFSET(StepChoice, seeds, 32);
QUIRE_OFFSET(StepChoice, edits, 40);

QUIRE_SIZE(StepResult, 64);
QUIRE_OFFSET(StepResult, out, 0);
QUIRE_OFFSET(StepResult, got, 8);
QUIRE_OFFSET(StepResult, open, 16);
QUIRE_OFFSET(StepResult, ids, 24);
QUIRE_OFFSET(StepResult, values, 32);
QUIRE_OFFSET(StepResult, ranks, 40);
QUIRE_OFFSET(StepResult, most, 48);
QUIRE_OFFSET(StepResult, hidden, 56);

QUIRE_SIZE(StateRows, 56);
QUIRE_OFFSET(StateRows, starts, 0);
QUIRE_OFFSET(StateRows, rows, 8);
QUIRE_OFFSET(StateRows, saves, 16);
QUIRE_OFFSET(StateRows, num_seqs, 24);
QUIRE_OFFSET(StateRows, tokens, 32);
QUIRE_OFFSET(StateRows, num_rows, 40);
QUIRE_OFFSET(StateRows, num_saves, 48);

QUIRE_SIZE(CausalConv, 128);
QUIRE_OFFSET(CausalConv, out, 0);
QUIRE_OFFSET(CausalConv, x, 8);
QUIRE_OFFSET(CausalConv, stride, 16);
QUIRE_OFFSET(CausalConv, channels, 24);
QUIRE_OFFSET(CausalConv, width, 32);
QUIRE_OFFSET(CausalConv, states, 40);
QUIRE_OFFSET(CausalConv, weight, 48);
QUIRE_OFFSET(CausalConv, bias, 56);
QUIRE_OFFSET(CausalConv, silu, 64);
QUIRE_OFFSET(CausalConv, of, 72);

QUIRE_SIZE(LinearScan, 240);
QUIRE_OFFSET(LinearScan, out, 0);
QUIRE_OFFSET(LinearScan, q, 8);
QUIRE_OFFSET(LinearScan, k, 16);
QUIRE_OFFSET(LinearScan, v, 24);
QUIRE_OFFSET(LinearScan, rate, 32);
QUIRE_OFFSET(LinearScan, beta, 40);
QUIRE_OFFSET(LinearScan, q_stride, 48);
QUIRE_OFFSET(LinearScan, k_stride, 56);
QUIRE_OFFSET(LinearScan, v_stride, 64);
QUIRE_OFFSET(LinearScan, rate_stride, 72);
QUIRE_OFFSET(LinearScan, beta_stride, 80);
QUIRE_OFFSET(LinearScan, decay, 88);
QUIRE_OFFSET(LinearScan, rate_bias, 96);
QUIRE_OFFSET(LinearScan, skip, 104);
QUIRE_OFFSET(LinearScan, states, 112);
QUIRE_OFFSET(LinearScan, state_scales, 120);
QUIRE_OFFSET(LinearScan, heads, 128);
QUIRE_OFFSET(LinearScan, key_heads, 136);
QUIRE_OFFSET(LinearScan, value_size, 144);
QUIRE_OFFSET(LinearScan, key_size, 152);
QUIRE_OFFSET(LinearScan, least_rate, 160);
QUIRE_OFFSET(LinearScan, most_rate, 164);
QUIRE_OFFSET(LinearScan, delta, 168);
QUIRE_OFFSET(LinearScan, decay_by_key, 172);
QUIRE_OFFSET(LinearScan, rate_by_key, 176);
QUIRE_OFFSET(LinearScan, states_dtype, 180);
QUIRE_OFFSET(LinearScan, of, 184);

QUIRE_SIZE(DiagonalScan, 96);
QUIRE_OFFSET(DiagonalScan, out, 0);
QUIRE_OFFSET(DiagonalScan, x, 8);
QUIRE_OFFSET(DiagonalScan, decay, 16);
QUIRE_OFFSET(DiagonalScan, states, 24);
QUIRE_OFFSET(DiagonalScan, channels, 32);
QUIRE_OFFSET(DiagonalScan, of, 40);

QUIRE_SIZE(LruInputs, 80);
QUIRE_OFFSET(LruInputs, inputs, 0);
QUIRE_OFFSET(LruInputs, decays, 8);
QUIRE_OFFSET(LruInputs, x, 16);
QUIRE_OFFSET(LruInputs, gates, 24);
QUIRE_OFFSET(LruInputs, biases, 32);
QUIRE_OFFSET(LruInputs, decay, 40);
QUIRE_OFFSET(LruInputs, positions, 48);
QUIRE_OFFSET(LruInputs, tokens, 56);
QUIRE_OFFSET(LruInputs, heads, 64);
QUIRE_OFFSET(LruInputs, size, 72);

QUIRE_SIZE(SelectTokens, 88);
QUIRE_OFFSET(SelectTokens, out, 0);
QUIRE_OFFSET(SelectTokens, queries, 8);
QUIRE_OFFSET(SelectTokens, factors, 16);
QUIRE_OFFSET(SelectTokens, keys, 24);
QUIRE_OFFSET(SelectTokens, visible, 32);
QUIRE_OFFSET(SelectTokens, rows, 40);
QUIRE_OFFSET(SelectTokens, heads, 48);
QUIRE_OFFSET(SelectTokens, size, 56);
QUIRE_OFFSET(SelectTokens, num_keys, 64);
QUIRE_OFFSET(SelectTokens, top_k, 72);
QUIRE_OFFSET(SelectTokens, scale, 80);

}  // namespace quire

#undef QUIRE_SIZE
#undef QUIRE_OFFSET
