"""GGUF's architectures and tensor names in terms of `transformers`. Torch-free.

Tensor names are those of gguf-py's tables. Properties that a file doesn't state, but that llama.cpp
derives from the architecture, are in this table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_FOUR_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GLM4_NORMS = {
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
_PHI = {"self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}
_GRANITE_MOE = {"block_sparse_moe.router.layer": "ffn_gate_inp"}
_RMS, _LAYER = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFamily:
    """An architecture.

    Attributes:
        architecture, model_type: the values for config.json.
        norm_eps: the key of the norms' epsilon.
        activation: the MLP's activation.
        turned: whether the rows of each query and key head are permuted so that rotary embedding
        pairs neighbours.
        names: names of a layer's tensors that differ from the usual ones.
        renormalize: whether the weights of the chosen experts are normalized to a sum of 1; None
        without experts.
        in_turns: whether its checkpoints interleave rows of gate and up, which a file separates.
        offset_norms: whether norm weights are stored with an added 1.
        states: whether some layers have a recurrent state instead of attention.
    """

    architecture: str
    model_type: str
    norm_eps: str = _RMS
    activation: str = "silu"
    turned: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    renormalize: bool | None = None
    in_turns: bool = False
    offset_norms: bool = False
    states: bool = False


_GELU = "gelu_pytorch_tanh"
FAMILIES: dict[str, GGUFFamily] = {
    "llama": GGUFFamily(architecture="LlamaForCausalLM", model_type="llama", turned=True),
    # After conversion these have the structure of a Llama.
    "internlm2": GGUFFamily(architecture="LlamaForCausalLM", model_type="llama", turned=True),
    "xverse": GGUFFamily(architecture="LlamaForCausalLM", model_type="llama", turned=True),
    "qwen2": GGUFFamily(architecture="Qwen2ForCausalLM", model_type="qwen2"),
    "qwen3": GGUFFamily(architecture="Qwen3ForCausalLM", model_type="qwen3"),
    "gemma": GGUFFamily(
        architecture="GemmaForCausalLM", model_type="gemma", activation=_GELU, offset_norms=True
    ),
    "gemma2": GGUFFamily(
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        activation=_GELU,
        names=_FOUR_NORMS,
        offset_norms=True,
    ),
    "gemma3": GGUFFamily(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        activation=_GELU,
        names=_FOUR_NORMS,
        offset_norms=True,
    ),
    "phi3": GGUFFamily(architecture="Phi3ForCausalLM", model_type="phi3"),
    "qwen2moe": GGUFFamily(
        architecture="Qwen2MoeForCausalLM", model_type="qwen2_moe", renormalize=False
    ),
    "qwen3moe": GGUFFamily(
        architecture="Qwen3MoeForCausalLM", model_type="qwen3_moe", renormalize=True
    ),
    "qwen3next": GGUFFamily(
        architecture="Qwen3NextForCausalLM",
        model_type="qwen3_next",
        names={
            "post_attention_layernorm": "post_attention_norm",
            "linear_attn.in_proj_qkvz": "ssm_in",
            "linear_attn.in_proj_ba": "ssm_ba",
            "linear_attn.conv1d": "ssm_conv1d",
            "linear_attn.norm": "ssm_norm",
            "linear_attn.out_proj": "ssm_out",
        },
        renormalize=True,
        offset_norms=True,
        states=True,
    ),
    "olmo2": GGUFFamily(architecture="Olmo2ForCausalLM", model_type="olmo2", names=_FOUR_NORMS),
    "olmoe": GGUFFamily(architecture="OlmoeForCausalLM", model_type="olmoe", renormalize=False),
    "smollm3": GGUFFamily(architecture="SmolLM3ForCausalLM", model_type="smollm3", turned=True),
    "granite": GGUFFamily(architecture="GraniteForCausalLM", model_type="granite", turned=True),
    "granitemoe": GGUFFamily(
        architecture="GraniteMoeForCausalLM",
        model_type="granitemoe",
        turned=True,
        names=_GRANITE_MOE,
        renormalize=True,
    ),
    "granitehybrid": GGUFFamily(
        architecture="GraniteMoeHybridForCausalLM",
        model_type="granitemoehybrid",
        turned=True,
        names={
            **_GRANITE_MOE,
            "mamba.in_proj": "ssm_in",
            "mamba.conv1d": "ssm_conv1d",
            "mamba.norm": "ssm_norm",
            "mamba.out_proj": "ssm_out",
        },
        renormalize=True,
        states=True,
    ),
    # The file names its scales as Granite's does, config.json doesn't.
    "minicpm": GGUFFamily(architecture="GraniteForCausalLM", model_type="granite", turned=True),
    "glm4": GGUFFamily(architecture="Glm4ForCausalLM", model_type="glm4", names=_GLM4_NORMS),
    "glm4moe": GGUFFamily(
        architecture="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        names={
            "post_attention_layernorm": "post_attention_norm",
            "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
            "mlp.shared_experts.up_proj": "ffn_up_shexp",
            "mlp.shared_experts.down_proj": "ffn_down_shexp",
        },
        renormalize=True,
    ),
    "command-r": GGUFFamily(architecture="CohereForCausalLM", model_type="cohere", norm_eps=_LAYER),
    "cohere2": GGUFFamily(architecture="Cohere2ForCausalLM", model_type="cohere2", norm_eps=_LAYER),
    "stablelm": GGUFFamily(
        architecture="StableLmForCausalLM", model_type="stablelm", norm_eps=_LAYER
    ),
    "starcoder2": GGUFFamily(
        architecture="Starcoder2ForCausalLM",
        model_type="starcoder2",
        norm_eps=_LAYER,
        activation=_GELU,
        names={"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    ),
    "phi2": GGUFFamily(
        architecture="PhiForCausalLM",
        model_type="phi",
        norm_eps=_LAYER,
        activation="gelu_new",
        names=_PHI,
    ),
    "gpt-oss": GGUFFamily(
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        names={"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"},
        renormalize=True,
        in_turns=True,
    ),
}
USUAL = GGUFFamily(architecture="", model_type="")


def family_of(architecture: str) -> GGUFFamily:
    """Return an architecture's family; for an unknown one, a family with the usual names."""
    return FAMILIES.get(architecture, USUAL)


# -- GGUF's names of the tensors in checkpoints of `transformers`.


_MODEL_TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.final_layernorm": "output_norm",
    "lm_head": "output",
}
_LAYER_TENSORS = {
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
#: Vectors whose names have no `.weight`.
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
    """Return the name of all experts' tensor for an expert's tensor, and the expert's number.

    For other tensors it returns the name itself, and None.
    """
    match = _EXPERT.fullmatch(name)
    if match is None or match.group(3) not in _EXPERTS:
        return name, None
    layer, expert, kind = match.groups()
    return f"{layer}.{_EXPERTS[kind]}.weight", int(expert)


def gguf_name(name: str, architecture: str) -> str:
    """Return the file's name of a tensor; unknown names are returned unchanged."""
    if vector := _VECTOR.fullmatch(name):
        return f"blk.{vector.group(1)}.{_VECTORS[vector.group(2)]}"
    match = _LAYER_NAME.fullmatch(name)
    if match is None:
        stem, _, kind = name.rpartition(".")
        return f"{_MODEL_TENSORS.get(stem, stem)}.{kind}"
    layer, stem, kind = match.groups()
    stored = {**_LAYER_TENSORS, **family_of(architecture).names}.get(stem, stem)
    return f"blk.{layer}.{stored}.{kind}"
