"""Random checkpoints of EAGLE heads in their published layouts, and their papers' equations.

The equations are computed over whole sequences, token by token, in float64, without a cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from tests.engine.models import VOCAB
from tests.engine.speculative.head_folders import HIDDEN

HEADS, KV_HEADS, DIM, INNER, THETA = 4, 2, 16, 80, 500.0
#: Logits of a draft, float64 [vocab]: of the model's states, [n - 1, any], and of n tokens or more;
#: those beyond n are drafts.
Equation = Callable[[Tensor, list[int]], Tensor]


def shape(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "intermediate_size": INNER,
        "num_hidden_layers": 1, "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "rope_theta": THETA, "max_position_embeddings": 64, **changes,
    }  # fmt: skip


def layer_tensors(prefix: str, columns: int) -> dict[str, Tensor]:
    sizes = {
        "self_attn.q_proj": (HEADS * DIM, columns), "self_attn.k_proj": (KV_HEADS * DIM, columns),
        "self_attn.v_proj": (KV_HEADS * DIM, columns), "self_attn.o_proj": (HIDDEN, HEADS * DIM),
        "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }  # fmt: skip
    tensors = {f"{prefix}{name}.weight": torch.randn(*size) / 6 for name, size in sizes.items()}
    tensors[f"{prefix}post_attention_layernorm.weight"] = 1 + torch.randn(HIDDEN) / 4
    return tensors


def eagle_parts(layout: str = "authors") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`layout`: "authors", "biased" (their first ones), "nested" (vLLM's) or "speculators"."""
    torch.manual_seed(7)
    prefix = "transformer." if layout == "speculators" else "layers.0."
    fusion = "fusion_fc" if layout == "speculators" else "fc"
    tensors = layer_tensors(prefix, HIDDEN)
    tensors[f"{fusion}.weight"] = torch.randn(HIDDEN, 2 * HIDDEN) / 4
    if layout == "biased":
        tensors[f"{fusion}.bias"] = torch.randn(HIDDEN)
        for part, size in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{prefix}self_attn.{part}_proj.bias"] = torch.randn(size * DIM)
    if layout == "nested":
        return {"model_type": "eagle", "architectures": ["EAGLEModel"], "model": shape()}, tensors
    if layout == "speculators":
        config = {"speculators_model_type": "eagle", "transformer_layer_config": shape()}
        return {**config, "architectures": ["EagleSpeculator"], "layernorms": False}, tensors
    return shape(), tensors


class Round:
    """The entries of drafts that follow one another: each is found once. And what the layer makes
    of a text, it makes of each beginning of it.
    """

    def __init__(self) -> None:
        self._states, self._entries = torch.empty(0), torch.empty(0)
        self._text, self._hidden = list[int](), torch.empty(0)

    def last(self, states: Tensor, text: list[int], layer: Callable[[], Tensor]) -> Tensor:
        """What the layer makes of the text's last token: `layer` finds it for all but the first."""
        if len(text) > len(states) + 1:  # behind a draft, which is nobody's beginning
            return layer()[-1]
        if self._text[: len(text)] != text:
            self._text, self._hidden = text, layer()
        return self._hidden[len(text) - 2]

    def entries(self, states: Tensor, first: Callable[[], Tensor]) -> Tensor:
        """Of the model's states, and of the drafts behind them so far."""
        if self._states is not states:
            self._states, self._entries = states, first()
        return self._entries

    def add(self, hidden: Tensor) -> Tensor:
        """A draft's; returns all."""
        self._entries = torch.cat((self._entries, hidden[None]))
        return self._entries


def eagle_equation(tensors: dict[str, Tensor], embedding: Tensor, head: Tensor) -> Equation:
    prefix = "transformer." if "fusion_fc.weight" in tensors else "layers.0."
    fusion = "fusion_fc" if prefix == "transformer." else "fc"
    tensors, rounds = doubles(tensors), Round()
    embedding, head = embedding.double(), head.double()

    def logits(states: Tensor, tokens: list[int]) -> Tensor:
        entries, hidden = rounds.entries(states, states.double), torch.empty(0)
        while len(entries) < len(tokens):
            embeddings = embedding[tokens[1 : len(entries) + 1]]
            x = linear(tensors, fusion, torch.cat((embeddings, entries), dim=-1))
            text = tokens[: len(entries) + 1]
            hidden = rounds.last(states, text, functools.partial(layer, tensors, prefix, x, x))
            entries = rounds.add(hidden)
        return head @ hidden

    return logits


def doubles(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of floats, once and not for each token."""
    return {name: tensor.double() if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()}  # fmt: skip


def layer(tensors: dict[str, Tensor], prefix: str, x: Tensor, residual: Tensor) -> Tensor:
    """[n, hidden] of what attention takes, [n, columns], and of the residual."""
    count = len(x)
    q, k, v = (
        linear(tensors, f"{prefix}self_attn.{part}_proj", x).view(count, -1, DIM).transpose(0, 1)
        for part in ("q", "k", "v")
    )
    q, k = rotated(q), rotated(k).repeat_interleave(HEADS // KV_HEADS, dim=0)
    scores = q @ k.transpose(1, 2) / math.sqrt(DIM)
    scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -math.inf)
    seen = scores.softmax(-1) @ v.repeat_interleave(HEADS // KV_HEADS, dim=0)
    out = linear(tensors, f"{prefix}self_attn.o_proj", seen.transpose(0, 1).reshape(count, -1))
    residual = residual + out
    y = normed(residual, tensors[f"{prefix}post_attention_layernorm.weight"])
    gate, up = (linear(tensors, f"{prefix}mlp.{part}_proj", y) for part in ("gate", "up"))
    return residual + linear(tensors, f"{prefix}mlp.down_proj", silu(gate) * up)


def linear(tensors: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = x @ tensors[f"{name}.weight"].double().T
    return y + tensors[f"{name}.bias"].double() if f"{name}.bias" in tensors else y


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight.double()


def rotated(x: Tensor) -> Tensor:
    """[heads, n, DIM], from position 0 on."""
    half = DIM // 2
    turns = torch.arange(x.shape[1]).double()[:, None]
    angles = turns * THETA ** (-torch.arange(half).double() / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def eagle3_parts(layout: str = "authors") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`layout`: "authors", "speculators" (which adds what it has normed), or "wide" (with a hidden
    size of its own, embeddings, and all tokens).
    """
    torch.manual_seed(8)
    prefix = "layers.0." if layout == "speculators" else "midlayer."
    tensors = layer_tensors(prefix, 2 * HIDDEN)
    for name in (f"{prefix}input_layernorm", f"{prefix}hidden_norm", "norm"):
        tensors[f"{name}.weight"] = 1 + torch.randn(HIDDEN) / 4
    tensors["fc.weight"] = torch.randn(HIDDEN, 3 * HIDDEN) / 8
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    if layout == "wide":
        tensors["lm_head.weight"] = torch.randn(VOCAB, HIDDEN)
        tensors["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
        return {**shape(), "eagle_config": ids}, tensors
    tokens = torch.tensor(sorted({5, 6, 7, *torch.randperm(VOCAB)[:97].tolist()}))
    tensors["d2t"] = tokens - torch.arange(len(tokens))
    tensors["t2d"] = torch.isin(torch.arange(VOCAB), tokens)
    tensors["lm_head.weight"] = torch.randn(len(tokens), HIDDEN)
    config = {"draft_vocab_size": len(tokens), **ids}
    if layout == "speculators":
        nested = {"speculators_model_type": "eagle3", "transformer_layer_config": shape()}
        return {**config, **nested, "architectures": ["Eagle3Speculator"]}, tensors
    return {**shape(), **config, "architectures": ["LlamaForCausalLMEagle3"]}, tensors


def eagle3_equation(tensors: dict[str, Tensor], embedding: Tensor) -> Equation:
    """Of the states that three layers begin with, side by side."""
    prefix = "midlayer." if "midlayer.hidden_norm.weight" in tensors else "layers.0."
    tensors = doubles(tensors)
    embedding = tensors.get("embed_tokens.weight", embedding).double()
    head = tensors["lm_head.weight"]
    tokens_of = torch.arange(len(head)) + tensors.get("d2t", torch.zeros(len(head)).long())

    rounds = Round()

    def logits(states: Tensor, tokens: list[int]) -> Tensor:
        entries = rounds.entries(states, lambda: linear(tensors, "fc", states.double()))
        hidden = torch.empty(0)
        while len(entries) < len(tokens):
            embeddings = embedding[tokens[1 : len(entries) + 1]]
            read = normed(entries, tensors[f"{prefix}hidden_norm.weight"])
            x = torch.cat(
                (normed(embeddings, tensors[f"{prefix}input_layernorm.weight"]), read), dim=-1
            )
            more = entries if prefix == "midlayer." else read
            text = tokens[: len(entries) + 1]
            hidden = rounds.last(states, text, functools.partial(layer, tensors, prefix, x, more))
            entries = rounds.add(hidden)
        logits = torch.full((VOCAB,), -math.inf).double()
        logits[tokens_of] = head @ normed(hidden, tensors["norm.weight"])
        return logits

    return logits
