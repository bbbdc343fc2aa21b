"""Architectures that no class of `transformers` computes: the oracle is written out in plain torch,
after the code that is published with their checkpoints, one sequence at a time and without a cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import layer_norm, linear, scaled_dot_product_attention, silu, softmax

from tests.survey.recipes import MAX_POSITIONS, VOCAB

Tensors = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]
_HIDDEN, _INNER, _HEADS, _SIZE, _LAYERS = 64, 96, 4, 16, 2
_EXPERTS = 4
_COMMON = {
    "vocab_size": VOCAB,
    "eos_token_id": 2,
    "bos_token_id": 0,
    "hidden_size": _HIDDEN,
    "intermediate_size": _INNER,
    "num_attention_heads": _HEADS,
    "num_hidden_layers": _LAYERS,
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


@dataclass(frozen=True, slots=True)
class Published:
    """One architecture.

    Attributes:
        architecture: as config.json names it.
        config: its config.json.
        shapes: of its checkpoint's tensors.
        logits: float32 [tokens, vocab] from the tensors and int64 [tokens].
    """

    architecture: str
    config: dict[str, Any]
    shapes: Shapes
    logits: Callable[[Tensors, Tensor], Tensor]

    def write(self, folder: Path, seed: int = 0) -> None:
        """A random float32 checkpoint, so large that greedy choices aren't ties."""
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            name: torch.randn(shape, generator=generator) * (0.2 if len(shape) == 1 else 0.3)
            for name, shape in self.shapes.items()
        }
        for name, tensor in tensors.items():
            if tensor.dim() == 1 and name.endswith("weight"):
                tensor += 1.0
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = {**self.config, "architectures": [self.architecture], "dtype": "float32"}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")

    def oracle(self, folder: Path) -> ReadTensorsOracle:
        """Its answers for a checkpoint that `write` has made."""
        tensors = load_file(folder / "model.safetensors")
        return ReadTensorsOracle(lambda ids: self.logits(tensors, ids))


class ReadTensorsOracle:
    """As `tiny.Oracle`, by a function from token ids to logits."""

    def __init__(self, logits: Callable[[Tensor], Tensor]) -> None:
        self._logits = logits

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """Exactly `count` tokens, EOS ignored."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self._logits(torch.tensor(tokens))[-1].argmax()))
        return tokens[len(prompt) :]

    def logprobs(self, tokens: list[int]) -> Tensor:
        """float32 [len(tokens), vocab]."""
        return torch.log_softmax(self._logits(torch.tensor(tokens)), dim=-1)


def _heads(x: Tensor) -> Tensor:
    """[T, heads * size] -> [heads, T, size]."""
    return x.view(len(x), -1, _SIZE).transpose(0, 1)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def _rotated(x: Tensor) -> Tensor:
    """Rotary embedding of [heads, T, size], halves against each other."""
    half = torch.arange(0, _SIZE, 2) / _SIZE
    angles = torch.arange(x.shape[1])[:, None] / 10000.0**half
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _attention(t: Tensors, prefix: str, x: Tensor) -> Tensor:
    """Llama's, with as many KV heads as the projections have rows for."""
    q, k, v = (_heads(linear(x, t[f"{prefix}{name}_proj.weight"])) for name in "qkv")
    q, k = _rotated(q), _rotated(k)
    k, v = (part.repeat_interleave(_HEADS // len(part), dim=0) for part in (k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=True)
    return linear(out.transpose(0, 1).flatten(1), t[f"{prefix}o_proj.weight"])


def _gated(t: Tensors, x: Tensor, names: Iterable[str]) -> Tensor:
    gate, up, down = names
    inner = silu(linear(x, t[f"{gate}.weight"])) * linear(x, t[f"{up}.weight"])
    return linear(inner, t[f"{down}.weight"])


def _llama_logits(
    t: Tensors, ids: Tensor, layer: Callable[[Tensors, int, Tensor], Tensor]
) -> Tensor:
    x = t["model.embed_tokens.weight"][ids]
    for index in range(_LAYERS):
        x = layer(t, index, x)
    return linear(_rms(x, t["model.norm.weight"]), t["lm_head.weight"])


def _decilm_layer(t: Tensors, index: int, x: Tensor) -> Tensor:
    prefix = f"model.layers.{index}."
    x = x + _attention(t, f"{prefix}self_attn.", _rms(x, t[f"{prefix}input_layernorm.weight"]))
    normed = _rms(x, t[f"{prefix}post_attention_layernorm.weight"])
    return x + _gated(t, normed, (f"{prefix}mlp.{name}_proj" for name in ("gate", "up", "down")))


def _arctic_layer(t: Tensors, index: int, x: Tensor) -> Tensor:
    prefix = f"model.layers.{index}."
    initial = x
    x = x + _attention(t, f"{prefix}self_attn.", _rms(x, t[f"{prefix}input_layernorm.weight"]))
    moe = f"{prefix}block_sparse_moe."
    if index % 2 == 0:
        normed = _rms(x, t[f"{prefix}post_attention_layernorm.weight"])
        return x + _gated(t, normed, (f"{moe}mlp.w{number}" for number in (1, 3, 2)))
    normed = _rms(x, t[f"{prefix}residual_layernorm.weight"])
    x = x + _gated(t, normed, (f"{prefix}residual_mlp.w{number}" for number in (1, 3, 2)))
    normed = _rms(initial, t[f"{prefix}post_attention_layernorm.weight"])
    weights, chosen = softmax(linear(normed, t[f"{moe}gate.weight"]), dim=-1).topk(2)
    weights = weights / weights.sum(-1, keepdim=True)
    for expert in range(_EXPERTS):
        names = (f"{moe}experts.{expert}.w{number}" for number in (1, 3, 2))
        share = (weights * (chosen == expert)).sum(-1, keepdim=True)
        x = x + share * _gated(t, normed, names)
    return x


def _alibi(count: int) -> Tensor:
    """float32 [heads, tokens, tokens]: what is added to the scores; causal."""
    distance = torch.arange(count)[None, :] - torch.arange(count)[:, None]
    slopes = 2.0 ** (-8.0 * torch.arange(1, _HEADS + 1) / _HEADS)
    bias: Tensor = slopes[:, None, None] * distance
    return bias.masked_fill(distance > 0, -torch.inf)


def _baichuan_layer(t: Tensors, index: int, x: Tensor) -> Tensor:
    prefix = f"model.layers.{index}."
    normed = _rms(x, t[f"{prefix}input_layernorm.weight"])
    fused = linear(normed, t[f"{prefix}self_attn.W_pack.weight"])
    q, k, v = (_heads(part) for part in fused.chunk(3, dim=-1))
    scores = q @ k.transpose(1, 2) / _SIZE**0.5 + _alibi(len(x))
    attended = (softmax(scores, dim=-1) @ v).transpose(0, 1).flatten(1)
    x = x + linear(attended, t[f"{prefix}self_attn.o_proj.weight"])
    normed = _rms(x, t[f"{prefix}post_attention_layernorm.weight"])
    return x + _gated(t, normed, (f"{prefix}mlp.{name}_proj" for name in ("gate", "up", "down")))


def _baichuan_logits(t: Tensors, ids: Tensor) -> Tensor:
    head = t["lm_head.weight"]
    t = {**t, "lm_head.weight": head / head.norm(dim=-1, keepdim=True)}
    return _llama_logits(t, ids, _baichuan_layer)


def _jais_logits(t: Tensors, ids: Tensor) -> Tensor:
    bias = _alibi(len(ids))
    x = t["transformer.wte.weight"][ids] * _JAIS["mup_embeddings_scale"]
    for index in range(_LAYERS):
        prefix = f"transformer.h.{index}."

        def conv(x: Tensor, name: str, prefix: str = prefix) -> Tensor:
            return x @ t[f"{prefix}{name}.weight"] + t[f"{prefix}{name}.bias"]

        q, k, v = (
            _heads(part)
            for part in conv(_ln(t, f"{prefix}ln_1", x), "attn.c_attn").chunk(3, dim=-1)
        )
        scores = q @ k.transpose(1, 2) / _SIZE + bias
        attended = (softmax(scores, dim=-1) @ v).transpose(0, 1).flatten(1)
        x = x + conv(attended, "attn.c_proj")
        normed = _ln(t, f"{prefix}ln_2", x)
        inner = conv(normed, "mlp.c_fc") * silu(conv(normed, "mlp.c_fc2"))
        x = x + conv(inner, "mlp.c_proj")
    scale = _JAIS["mup_output_alpha"] * _JAIS["mup_width_scale"]
    return linear(_ln(t, "transformer.ln_f", x), t["transformer.wte.weight"]) * scale


def _unseen(count: int) -> Tensor:
    """bool [heads, tokens, tokens]: what block-sparse attention doesn't look at."""
    positions = torch.arange(count)
    block, far = positions // _SPARSE_BLOCK, positions[:, None] < positions[None, :]
    near = block[:, None] - block[None, :] < _PHI3["blocksparse_num_local_blocks"]
    every = _PHI3["blocksparse_vert_stride"]
    heads = [(block + head + 1) % every == 0 for head in range(_HEADS)]
    return torch.stack([far | ~(near | chosen[None, :]) for chosen in heads])


def _phi3small_logits(t: Tensors, ids: Tensor) -> Tensor:
    x = t["model.embed_tokens.weight"][ids] * _PHI3["mup_embedding_multiplier"]
    dense = torch.ones(len(x), len(x), dtype=torch.bool).triu(1).expand(_HEADS, -1, -1)
    for index in range(_LAYERS):
        prefix = f"model.layers.{index}."

        def project(x: Tensor, name: str, prefix: str = prefix) -> Tensor:
            return linear(x, t[f"{prefix}{name}.weight"], t[f"{prefix}{name}.bias"])

        fused = project(_ln(t, f"{prefix}input_layernorm", x), "self_attn.query_key_value")
        # By KV head: its queries, its key, its value.
        parts = fused.view(len(x), 2, _HEADS // 2 + 2, _SIZE)
        q = _rotated(parts[:, :, :-2].flatten(1, 2).transpose(0, 1))
        k = _rotated(parts[:, :, -2].transpose(0, 1)).repeat_interleave(2, dim=0)
        v = parts[:, :, -1].transpose(0, 1).repeat_interleave(2, dim=0)
        scores = q @ k.transpose(1, 2) * _PHI3["mup_attn_multiplier"] / _SIZE
        hidden = dense if (index + 1) % 2 == 0 else _unseen(len(x))
        attended = softmax(scores.masked_fill(hidden, -torch.inf), dim=-1) @ v
        x = x + project(attended.transpose(0, 1).flatten(1), "self_attn.dense")
        inner = project(_ln(t, f"{prefix}post_attention_layernorm", x), "mlp.up_proj")
        gate, up = inner[:, 0::2].clamp(max=1.0), inner[:, 1::2].clamp(-1.0, 1.0)
        x = x + project(gate * torch.sigmoid(1.702 * gate) * (up + 1), "mlp.down_proj")
    head = t["model.embed_tokens.weight"]
    logits = linear(_ln(t, "model.final_layernorm", x), head) / _PHI3["mup_width_multiplier"]
    logits[:, _PHI3["dummy_token_indices"]] = torch.finfo(torch.float32).min
    return logits


def _ln(t: Tensors, name: str, x: Tensor) -> Tensor:
    return layer_norm(x, (_HIDDEN,), t[f"{name}.weight"], t[f"{name}.bias"], 1e-5)


def _llama_shapes(kv_heads: tuple[int, ...]) -> Shapes:
    """Everything but the MLPs."""
    shapes: Shapes = {
        "model.embed_tokens.weight": (VOCAB, _HIDDEN),
        "model.norm.weight": (_HIDDEN,),
        "lm_head.weight": (VOCAB, _HIDDEN),
    }
    for index, heads in enumerate(kv_heads):
        prefix = f"model.layers.{index}."
        rows = {"q": _HIDDEN, "k": heads * _SIZE, "v": heads * _SIZE, "o": _HIDDEN}
        shapes |= {f"{prefix}self_attn.{n}_proj.weight": (r, _HIDDEN) for n, r in rows.items()}
        for norm in ("input", "post_attention"):
            shapes[f"{prefix}{norm}_layernorm.weight"] = (_HIDDEN,)
    return shapes


def _mlp_shapes(names: Iterable[str], inner: int = _INNER) -> Shapes:
    gate, up, down = names
    return {
        f"{gate}.weight": (inner, _HIDDEN),
        f"{up}.weight": (inner, _HIDDEN),
        f"{down}.weight": (_HIDDEN, inner),
    }


def _decilm_shapes() -> Shapes:
    shapes = _llama_shapes(_DECILM["num_key_value_heads_per_layer"])
    for index in range(_LAYERS):
        names = (f"model.layers.{index}.mlp.{name}_proj" for name in ("gate", "up", "down"))
        shapes |= _mlp_shapes(names)
    return shapes


def _baichuan_shapes() -> Shapes:
    shapes = _llama_shapes((4, 4))
    for index in range(_LAYERS):
        prefix = f"model.layers.{index}."
        for name in "qkv":
            del shapes[f"{prefix}self_attn.{name}_proj.weight"]
        shapes[f"{prefix}self_attn.W_pack.weight"] = (3 * _HIDDEN, _HIDDEN)
        names = (f"{prefix}mlp.{name}_proj" for name in ("gate", "up", "down"))
        shapes |= _mlp_shapes(names)
    return shapes


def _arctic_shapes() -> Shapes:
    prefix = "model.layers.1."
    moe = f"{prefix}block_sparse_moe."
    shapes = _llama_shapes((2, 2))
    shapes |= _mlp_shapes(f"model.layers.0.block_sparse_moe.mlp.w{n}" for n in (1, 3, 2))
    shapes |= _mlp_shapes((f"{prefix}residual_mlp.w{n}" for n in (1, 3, 2)), inner=_HIDDEN)
    shapes |= {
        f"{prefix}residual_layernorm.weight": (_HIDDEN,),
        f"{moe}gate.weight": (_EXPERTS, 64),
    }
    for expert in range(_EXPERTS):
        shapes |= _mlp_shapes(f"{moe}experts.{expert}.w{n}" for n in (1, 3, 2))
    return shapes


def _jais_shapes() -> Shapes:
    shapes: Shapes = {"transformer.wte.weight": (VOCAB, _HIDDEN)}
    norms = ["transformer.ln_f"]
    for index in range(_LAYERS):
        prefix = f"transformer.h.{index}."
        norms += [f"{prefix}ln_1", f"{prefix}ln_2"]
        sizes = {
            "attn.c_attn": (_HIDDEN, 3 * _HIDDEN),
            "attn.c_proj": (_HIDDEN, _HIDDEN),
            "mlp.c_fc": (_HIDDEN, _INNER),
            "mlp.c_fc2": (_HIDDEN, _INNER),
            "mlp.c_proj": (_INNER, _HIDDEN),
        }
        shapes |= {f"{prefix}{name}.weight": shape for name, shape in sizes.items()}
        shapes |= {f"{prefix}{name}.bias": shape[1:] for name, shape in sizes.items()}
    shapes |= {f"{name}.{part}": (_HIDDEN,) for name in norms for part in ("weight", "bias")}
    return shapes


def _phi3small_shapes() -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (VOCAB, _HIDDEN)}
    norms = ["model.final_layernorm"]
    for index in range(_LAYERS):
        prefix = f"model.layers.{index}."
        norms += [f"{prefix}input_layernorm", f"{prefix}post_attention_layernorm"]
        sizes = {
            "self_attn.query_key_value": (2 * _HIDDEN, _HIDDEN),
            "self_attn.dense": (_HIDDEN, _HIDDEN),
            "mlp.up_proj": (2 * _INNER, _HIDDEN),
            "mlp.down_proj": (_HIDDEN, _INNER),
        }
        shapes |= {f"{prefix}{name}.weight": shape for name, shape in sizes.items()}
        shapes |= {f"{prefix}{name}.bias": shape[:1] for name, shape in sizes.items()}
    return shapes | {f"{name}.{part}": (_HIDDEN,) for name in norms for part in ("weight", "bias")}


_SPARSE_BLOCK = 8
_PHI3: dict[str, Any] = {
    "vocab_size": VOCAB,
    "eos_token_id": 2,
    "bos_token_id": 0,
    "hidden_size": _HIDDEN,
    "ff_intermediate_size": _INNER,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": 2,
    "num_hidden_layers": _LAYERS,
    "max_position_embeddings": MAX_POSITIONS,
    "layer_norm_epsilon": 1e-5,
    "hidden_act": "gegelu",
    "gegelu_limit": 1.0,
    "rope_embedding_base": 10000.0,
    "rope_position_scale": 1.0,
    "blocksparse_homo_head_pattern": False,
    "blocksparse_block_size": _SPARSE_BLOCK,
    "blocksparse_num_local_blocks": 2,
    "blocksparse_vert_stride": 3,
    "dense_attention_every_n_layers": 2,
    "mup_use_scaling": True,
    "mup_attn_multiplier": 1.0,
    "mup_embedding_multiplier": 10.0,
    "mup_width_multiplier": 2.0,
    "dummy_token_indices": [1, 3],
}
_DECILM: dict[str, Any] = {**_COMMON, "num_key_value_heads_per_layer": (4, 1)}
_ARCTIC: dict[str, Any] = {
    **_COMMON,
    "num_key_value_heads": 2,
    "num_local_experts": _EXPERTS,
    "num_experts_per_tok": 2,
    "moe_layer_frequency": 2,
    "use_residual": True,
    "parallel_attn_mlp_res": True,
}
_BAICHUAN: dict[str, Any] = {
    **{name: value for name, value in _COMMON.items() if name != "max_position_embeddings"},
    "model_max_length": MAX_POSITIONS,
    "z_loss_weight": 0,
}
_JAIS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "eos_token_id": 2,
    "bos_token_id": 0,
    "n_embd": _HIDDEN,
    "n_layer": _LAYERS,
    "n_head": _HEADS,
    "n_inner": _INNER,
    "n_positions": MAX_POSITIONS,
    "activation_function": "swiglu",
    "position_embedding_type": "alibi",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "mup_embeddings_scale": 3.0,
    "mup_output_alpha": 2.0,
    "mup_width_scale": 0.25,
    "mup_scale_qk_dot_by_d": True,
}
PUBLISHED: dict[str, Published] = {
    "arctic": Published(
        "ArcticForCausalLM",
        _ARCTIC,
        _arctic_shapes(),
        lambda t, ids: _llama_logits(t, ids, _arctic_layer),
    ),
    "baichuan2-13b": Published(
        "BaiChuanForCausalLM", _BAICHUAN, _baichuan_shapes(), _baichuan_logits
    ),
    "decilm": Published(
        "DeciLMForCausalLM",
        _DECILM,
        _decilm_shapes(),
        lambda t, ids: _llama_logits(t, ids, _decilm_layer),
    ),
    "jais": Published("JAISLMHeadModel", _JAIS, _jais_shapes(), _jais_logits),
    "phi3small": Published("Phi3SmallForCausalLM", _PHI3, _phi3small_shapes(), _phi3small_logits),
}
