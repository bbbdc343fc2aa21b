"""How a family's checkpoint calls its tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNames:
    """Names of weights without `.weight`; the defaults are Llama's.

    `""` means that the family has no such weight. `layer` holds the layer's number as `{}`; names
    of a layer's weights are relative to it. One name in `qkv` (or in `up` of a gated MLP) is one
    fused tensor. `optional_prefix` is left out by some of the family's checkpoints.
    """

    optional_prefix: str = ""
    embedding: str = "model.embed_tokens"
    positions: str = ""
    embedding_norm: str = ""
    final_norm: str = "model.norm"
    lm_head: str = "lm_head"

    layer: str = "model.layers.{}."
    attention_norm: str = "input_layernorm"
    attention_out_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    mlp_out_norm: str = ""

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"

    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"

    #: Of the MLP beside experts.
    residual_norm: str = "residual_layernorm"
    residual_up: tuple[str, ...] = ("residual_mlp.w1", "residual_mlp.w3")
    residual_down: str = "residual_mlp.w2"
