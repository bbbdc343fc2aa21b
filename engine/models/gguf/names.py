"""What GGUF calls the tensors that checkpoints of `transformers` have."""

from __future__ import annotations

import re

from engine.models.gguf.families import family_of

_WHOLE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.final_layernorm": "output_norm",
    "lm_head": "output",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
}
_EXPERTS = {
    "gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps",
}  # fmt: skip
_EXPERT = re.compile(
    r"(model\.layers\.\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight"
)
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
#: Vectors without `.weight`.
_VECTORS = {
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mamba.dt_bias": "ssm_dt.bias",
    "mamba.D": "ssm_d",
    "mamba.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
}
_VECTOR = re.compile(rf"model\.layers\.(\d+)\.({'|'.join(map(re.escape, _VECTORS))})")


def expert_of(name: str) -> tuple[str, int | None]:
    """The name of all experts' tensor, which a file keeps together, and the expert's number.

    Of another tensor its own name, and None.
    """
    match = _EXPERT.fullmatch(name)
    if match is None or match.group(3) not in _EXPERTS:
        return name, None
    layer, expert, kind = match.groups()
    return f"{layer}.{_EXPERTS[kind]}.weight", int(expert)


def gguf_name(name: str, architecture: str) -> str:
    """The file's name of a tensor; names that it has none for stay as they are."""
    if vector := _VECTOR.fullmatch(name):
        return f"blk.{vector.group(1)}.{_VECTORS[vector.group(2)]}"
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        stem, _, kind = name.rpartition(".")
        return f"{_WHOLE.get(stem, stem)}.{kind}"
    layer, stem, kind = match.groups()
    found = {**_LAYER, **family_of(architecture).names}.get(stem, stem)
    return f"blk.{layer}.{found}.{kind}"
