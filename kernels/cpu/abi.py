"""The library's structs and functions: `python -m tools.abi` writes this from abi.h."""
# fmt: off

from __future__ import annotations

import ctypes
from typing import Any

L, N, F, D, P = ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_double, ctypes.c_void_p


class Activation(ctypes.Structure):
    _fields_ = [
        ("kind", N), ("limit", F), ("alpha", F),
    ]


class Norm(ctypes.Structure):
    _fields_ = [
        ("weight", P), ("bias", P), ("kind", L),
    ]


class HeadNorm(ctypes.Structure):
    _fields_ = [
        ("weight", P), ("bias", P), ("stride", L),
    ]


class Sparse(ctypes.Structure):
    _fields_ = [
        ("block", L), ("local", L), ("stride", L), ("head_step", L),
    ]


class AttentionArgs(ctypes.Structure):
    _fields_ = [
        ("q", P), ("out", P), ("q_stride", L), ("tokens", L), ("q_heads", L), ("kv_heads", L),
        ("head_size", L), ("key_cache", P), ("value_cache", P), ("key_scales", P),
        ("value_scales", P), ("num_blocks", L), ("block_size", L), ("block_tables", P),
        ("table_stride", L), ("seq_lens", P), ("starts", P), ("num_seqs", L), ("alibi", P),
        ("sinks", P), ("window", L), ("sparse", Sparse), ("scale", F), ("soft_cap", F),
        ("dtype", N), ("cache_dtype", N), ("rows", P), ("num_rows", L), ("round_inputs", N),
        ("visible_ends", P), ("distance_bias", P), ("num_distances", L), ("ranks", P),
    ]


class RopeArgs(ctypes.Structure):
    _fields_ = [
        ("q", P), ("k", P), ("v", P), ("q_stride", L), ("k_stride", L), ("v_stride", L),
        ("tokens", L), ("q_heads", L), ("kv_heads", L), ("head_size", L), ("positions", P),
        ("cos_sin", P), ("max_position", L), ("rotary", L), ("key_cache", P), ("value_cache", P),
        ("key_scales", P), ("value_scales", P), ("num_blocks", L), ("block_size", L), ("slots", P),
        ("q_norm", P), ("k_norm", P), ("eps", F), ("norm_dtype", N), ("neox", N), ("dtype", N),
        ("cache_dtype", N),
    ]


class Experts(ctypes.Structure):
    _fields_ = [
        ("hidden", L), ("count", L), ("top_k", L), ("inner", L), ("shared_inner", L), ("groups", L),
        ("top_groups", L), ("group_best", L), ("router", P), ("gate_up", P), ("down", P),
        ("shared_gate_up", P), ("shared_down", P), ("shared_gate", P), ("choice_bias", P),
        ("softmax_first", N), ("sigmoid", N), ("renormalize", N), ("scale", F), ("act", Activation),
        ("ranks", P), ("owners", P), ("copies", L), ("loads", P), ("row_ranks", N),
    ]


class LoraPart(ctypes.Structure):
    _fields_ = [
        ("b", P), ("first", L), ("columns", L), ("start", L), ("rank", L), ("scale", F),
    ]


class LoraLinear(ctypes.Structure):
    _fields_ = [
        ("a", P), ("n", L), ("rank", L), ("k", L), ("parts", P), ("num_parts", L), ("gain", P),
        ("shift", P), ("dtype", N), ("pairs", N),
    ]


class LoraLayer(ctypes.Structure):
    _fields_ = [
        ("qkv", P), ("o", P), ("up", P), ("down", P), ("router", P), ("shared_up", P),
        ("shared_down", P), ("shared_gate", P), ("state_in", P), ("state_selection", P),
        ("state_rates", P), ("state_gates", P), ("state_out", P), ("expert_ups", P),
        ("expert_downs", P),
    ]


class LoraGroup(ctypes.Structure):
    _fields_ = [
        ("layers", P), ("rows", P), ("count", L),
    ]


class LoraUse(ctypes.Structure):
    _fields_ = [
        ("linear", P), ("rows", P), ("count", L),
    ]


class LoraInputs(ctypes.Structure):
    _fields_ = [
        ("from", L), ("to", L), ("rank", L), ("first", L), ("count", L), ("k", L),
    ]


class LoraOutputs(ctypes.Structure):
    _fields_ = [
        ("from", L), ("to", L), ("columns", L), ("rank", L), ("pairs", L),
    ]


class DecoderShape(ctypes.Structure):
    _fields_ = [
        ("hidden", L), ("q_heads", L), ("kv_heads", L), ("head_size", L), ("inner", L),
        ("num_blocks", L), ("block_size", L), ("max_position", L), ("rotary", L), ("eps", F),
        ("scale", F), ("soft_cap", F), ("residual_scale", F), ("cache_dtype", N), ("neox", N),
        ("gated", N), ("parallel", N), ("round_inputs", N), ("act", Activation), ("clip_qkv", F),
        ("attention_output_scale", F), ("mlp_gate_scale", F), ("mlp_output_scale", F),
        ("attention_output_gate", N), ("normed_residual", N), ("attention_residual", F),
        ("state_residual", F), ("mlp_residual", F), ("ranks", P),
    ]


class StateLayer(ctypes.Structure):
    _fields_ = [
        ("inputs", P), ("output", P), ("selection", P), ("rates", P), ("gates", P),
        ("rates_norm", Norm), ("key_norm", Norm), ("query_norm", Norm), ("input_scales", P),
        ("head_gates", P), ("gate_biases", P), ("conv", P), ("conv_bias", P), ("decay", P),
        ("rate_bias", P), ("skip", P), ("norm", P), ("conv_states", P), ("scan_states", P),
        ("scan_scales", P), ("num_blocks", L), ("heads", L), ("key_heads", L), ("value_size", L),
        ("key_size", L), ("width", L), ("channels", L), ("least_rate", F), ("most_rate", F),
        ("output_scale", F), ("eps", F), ("kind", N), ("norm_before_gate", N), ("states_dtype", N),
    ]


class LatentLayer(ctypes.Structure):
    _fields_ = [
        ("inputs", P), ("queries", P), ("query_norm", P), ("latent_norm", P), ("into", P),
        ("out_of", P), ("latent", L), ("rotary", L), ("rest", L), ("value_size", L), ("eps", F),
    ]


class SharedBlock(ctypes.Structure):
    _fields_ = [
        ("attention_norm", Norm), ("mlp_norm", Norm), ("mixer_norm", Norm), ("gate_up", P),
        ("down", P), ("output", P), ("added", LoraLayer),
    ]


class DecoderLayer(ctypes.Structure):
    _fields_ = [
        ("input_norm", Norm), ("qkv", P), ("q_norm", P), ("k_norm", P), ("q_full_norm", P),
        ("k_full_norm", P), ("q_head_norm", HeadNorm), ("k_head_norm", HeadNorm), ("cos_sin", P),
        ("key_cache", P), ("value_cache", P), ("key_scales", P), ("value_scales", P), ("window", L),
        ("sparse", Sparse), ("alibi", P), ("sinks", P), ("o", P), ("attention_out_norm", Norm),
        ("mlp_norm", Norm), ("gate_up", P), ("down", P), ("experts", P), ("mlp_out_norm", Norm),
        ("group", L), ("state", P), ("latents", P), ("shared", P),
    ]


class DecoderGroup(ctypes.Structure):
    _fields_ = [
        ("slots", P), ("block_tables", P), ("table_stride", L),
    ]


class StepEnds(ctypes.Structure):
    _fields_ = [
        ("decoder", P), ("embedding", P), ("head", P), ("positions", P), ("num_positions", L),
        ("position_offset", L), ("embedding_scale", F), ("logit_scale", F), ("taps", P),
        ("num_taps", L),
    ]


class BlockTable(ctypes.Structure):
    _fields_ = [
        ("blocks", P), ("stride", L),
    ]


class StepTables(ctypes.Structure):
    _fields_ = [
        ("tokens", P), ("token_stride", L), ("block_tables", P), ("num_groups", L),
        ("num_prompt", P), ("num_tokens", P), ("num_computed", P), ("rope_offsets", P),
        ("num_rows", L), ("state_blocks", P), ("state_tokens", P), ("num_state_blocks", L),
    ]


class RowEdits(ctypes.Structure):
    _fields_ = [
        ("allowed", P), ("forbidden", P), ("num_forbidden", L), ("words", P), ("word_starts", P),
        ("num_words", L), ("ends", P), ("num_ends", L), ("min_tokens", L), ("biased", P),
        ("biases", P), ("num_biased", L), ("repetition", F), ("frequency", F), ("presence", F),
        ("counts_prompt", N), ("num_logprobs", L),
    ]


class StepChoice(ctypes.Structure):
    _fields_ = [
        ("temperature", P), ("top_k", P), ("top_p", P), ("min_p", P), ("seeds", P), ("edits", P),
    ]


class StepResult(ctypes.Structure):
    _fields_ = [
        ("out", P), ("got", P), ("open", P), ("ids", P), ("values", P), ("ranks", P), ("most", L),
        ("hidden", P),
    ]


class StateRows(ctypes.Structure):
    _fields_ = [
        ("starts", P), ("rows", P), ("saves", P), ("num_seqs", L), ("tokens", L), ("num_rows", L),
        ("num_saves", L),
    ]


class CausalConv(ctypes.Structure):
    _fields_ = [
        ("out", P), ("x", P), ("stride", L), ("channels", L), ("width", L), ("states", P),
        ("weight", P), ("bias", P), ("silu", N), ("of", StateRows),
    ]


class LinearScan(ctypes.Structure):
    _fields_ = [
        ("out", P), ("q", P), ("k", P), ("v", P), ("rate", P), ("beta", P), ("q_stride", L),
        ("k_stride", L), ("v_stride", L), ("rate_stride", L), ("beta_stride", L), ("decay", P),
        ("rate_bias", P), ("skip", P), ("states", P), ("state_scales", P), ("heads", L),
        ("key_heads", L), ("value_size", L), ("key_size", L), ("least_rate", F), ("most_rate", F),
        ("delta", N), ("decay_by_key", N), ("rate_by_key", N), ("states_dtype", N),
        ("of", StateRows),
    ]


class DiagonalScan(ctypes.Structure):
    _fields_ = [
        ("out", P), ("x", P), ("decay", P), ("states", P), ("channels", L), ("of", StateRows),
    ]


class LruInputs(ctypes.Structure):
    _fields_ = [
        ("inputs", P), ("decays", P), ("x", P), ("gates", P), ("biases", P), ("decay", P),
        ("positions", P), ("tokens", L), ("heads", L), ("size", L),
    ]


class SelectTokens(ctypes.Structure):
    _fields_ = [
        ("out", P), ("queries", P), ("factors", P), ("keys", P), ("visible", P), ("rows", L),
        ("heads", L), ("size", L), ("num_keys", L), ("top_k", L), ("scale", F),
    ]


#: Result and arguments of each function.
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "quire_gate_and_mul": (N, [P, P, L, L, N, N, N]),
    "quire_activate": (N, [P, P, L, L, N, N, N]),
    "quire_paged_attention": (N, [P, N]),
    "quire_read_memory": (N, [P, L, N]),
    "quire_multiply": (N, [L, N]),
    "quire_decoder_new": (P, [P, P, L, P]),
    "quire_decoder_free": (None, [P]),
    "quire_decoder_run": (N, [P, P, P, L, P, P, L, P, P, L, P, L, P, L, P, L, P, P, N]),
    "quire_run_experts": (N, [P, P, P, L, P, L, N]),
    "quire_linear": (N, [P, P, P, L, L, N, N]),
    "quire_linear_heads": (N, [P, L, P, L, L, P, L, L, L, N, N]),
    "quire_pack_new": (P, [N, L, L, L, P, N, P, P]),
    "quire_pack_rows": (N, [P, L, L, P, L, N, N]),
    "quire_pack_quantized_rows": (N, [P, L, L, P, L, N, N]),
    "quire_pack_integer_rows": (N, [P, L, L, P, P, P, N]),
    "quire_pack_float8_rows": (N, [P, L, L, P, P, N]),
    "quire_free_packed": (None, [P]),
    "quire_packed_bytes": (L, [P]),
    "quire_linear_rows": (N, [P, P, P, L, N]),
    "quire_ranks_bytes": (L, [N, L]),
    "quire_ranks_new": (P, [P, N, N, L, L, P]),
    "quire_ranks_free": (None, [P]),
    "quire_ranks_fail": (None, [P]),
    "quire_ranks_reset": (None, [P]),
    "quire_ranks_forget_failure": (None, [P]),
    "quire_ranks_listen": (N, [P]),
    "quire_ranks_interrupt": (None, [P]),
    "quire_ranks_waited_ns": (L, [P]),
    "quire_ranks_missing": (N, [P]),
    "quire_ranks_gathers": (L, [P]),
    "quire_ranks_gather": (N, [P, P, P, L, P, N]),
    "quire_shard_linear": (N, [P, P, P, P]),
    "quire_add_lora": (N, [P, L, P, L, L, P, L, N]),
    "quire_pack_lora_outputs": (N, [P, P, L, L, N, N]),
    "quire_pack_lora_inputs": (N, [P, P, L, L, N]),
    "quire_fill_lora": (N, [P, P, P, L, P, L, N]),
    "quire_all_numbers": (N, [P, L, N]),
    "quire_allocate_lora": (P, [L]),
    "quire_free_lora": (None, [P]),
    "quire_rms_norm": (N, [P, P, P, L, L, F, N, N, N]),
    "quire_add_rms_norm": (N, [P, P, P, P, L, L, F, N, N, N]),
    "quire_bind_threads": (N, [P, N]),
    "quire_rope_and_cache": (N, [P, N]),
    "quire_vector_bits": (N, []),
    "quire_has_bf16": (N, []),
    "quire_has_vnni": (N, []),
    "quire_map_pages": (None, [P, L]),
    "quire_nothing": (N, [P, P, L, L, F, N]),
    "quire_argmax": (N, [P, P, L, L, N]),
    "quire_sample": (N, [P, P, L, L, P, P, P, P, P, N]),
    "quire_top_logprobs": (N, [P, P, P, P, P, L, L, P, L, N]),
    "quire_causal_conv": (N, [P, N]),
    "quire_linear_scan": (N, [P, N]),
    "quire_diagonal_scan": (N, [P, N]),
    "quire_lru_inputs": (N, [P, N]),
    "quire_select_tokens": (N, [P, N]),
    "quire_step_new": (P, [P, P]),
    "quire_step_free": (None, [P]),
    "quire_step_run": (N, [P, P, P, L, L, P, P, P, L, N]),
}
