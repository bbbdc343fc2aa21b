"""Reading experts' weights in the ways that checkpoints keep them.

Every layout is brought to the same form: gate over up [2 I, H] and down [H, I] for each expert.

- "split": one tensor an expert and projection, or (where the fused names are there) `gate_up_proj`
  [E, 2 I, H] and `down_proj` [E, H, I];
- "interleaved" (gpt-oss): `gate_up_proj` [E, H, 2 I] with gate and up in turns, `down_proj`
  [E, I, H], each with a bias;
- "flat" (DBRX): `w1`, `v1` and `w2`, each [E I, H];
- "granite": `input_linear` [E, 2 I, H] and `output_linear` [E, H, I]; of a GGUF file as "split".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from engine.models.spec import MoeSpec
from engine.quantization.matrix import Matrix

ExpertWeights = tuple[Tensor, Tensor | None, Tensor, Tensor | None]
"""gate over up, its bias, down, its bias."""


class Weights(Protocol):
    """Where tensors come from: a checkpoint or a source of random ones."""

    def __contains__(self, name: str) -> bool: ...

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The named tensor, which must have this shape."""

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """The same of two dimensions, to be read some rows at a time."""

    def release(self) -> None:
        """Give back the memory of what has been read; tensors stay valid."""


def read_experts(
    weights: Weights, layer: str, moe: MoeSpec, hidden: int
) -> Iterator[ExpertWeights]:
    """Each expert of a layer in turn; `layer` is the prefix of the layer's names."""
    return _LAYOUTS[moe.layout](weights, layer + moe.experts, moe, hidden)


def split_experts(layer: str, moe: MoeSpec) -> str:
    """What precedes an expert's number where each has tensors of its own; "": none has."""
    first = layer + moe.experts
    return {"split": first, "granite": f"{first}experts."}.get(moe.layout, "")


def _split(weights: Weights, at: str, moe: MoeSpec, hidden: int) -> Iterator[ExpertWeights]:
    inner = moe.intermediate_size
    if f"{at}0.{moe.expert_names[0]}.weight" not in weights and f"{at}gate_up_proj" in weights:
        yield from _fused(weights, f"{at}gate_up_proj", f"{at}down_proj", moe, hidden)
        return
    for expert in range(moe.num_experts):
        gate, up, down = (f"{at}{expert}.{name}.weight" for name in moe.expert_names)
        both = [weights.get(name, (inner, hidden)) for name in (gate, up)]
        yield torch.cat(both), None, weights.get(down, (hidden, inner)), None


def _granite(weights: Weights, at: str, moe: MoeSpec, hidden: int) -> Iterator[ExpertWeights]:
    if f"{at}experts.0.{moe.expert_names[0]}.weight" in weights:
        return _split(weights, f"{at}experts.", moe, hidden)
    return _fused(weights, f"{at}input_linear.weight", f"{at}output_linear.weight", moe, hidden)


def _fused(
    weights: Weights, up: str, down: str, moe: MoeSpec, hidden: int
) -> Iterator[ExpertWeights]:
    count, inner = moe.num_experts, moe.intermediate_size
    gate_ups = weights.get(up, (count, 2 * inner, hidden))
    downs = weights.get(down, (count, hidden, inner))
    for expert in range(count):
        yield gate_ups[expert], None, downs[expert], None


def _interleaved(weights: Weights, at: str, moe: MoeSpec, hidden: int) -> Iterator[ExpertWeights]:
    count, inner = moe.num_experts, moe.intermediate_size
    gate_ups = weights.get(f"{at}gate_up_proj", (count, hidden, 2 * inner))
    up_biases = weights.get(f"{at}gate_up_proj_bias", (count, 2 * inner))
    downs = weights.get(f"{at}down_proj", (count, inner, hidden))
    down_biases = weights.get(f"{at}down_proj_bias", (count, hidden))
    for expert in range(count):
        rows, bias = gate_ups[expert].T, up_biases[expert]
        gate_up = torch.cat((rows[::2], rows[1::2]))
        yield gate_up, torch.cat((bias[::2], bias[1::2])), downs[expert].T, down_biases[expert]


def _flat(weights: Weights, at: str, moe: MoeSpec, hidden: int) -> Iterator[ExpertWeights]:
    count, inner = moe.num_experts, moe.intermediate_size
    gate, up, down = (
        weights.get(f"{at}{name}", (count * inner, hidden)).view(count, inner, hidden)
        for name in moe.expert_names
    )
    for expert in range(count):
        yield torch.cat((gate[expert], up[expert])), None, down[expert].T, None


_LAYOUTS = {"split": _split, "interleaved": _interleaved, "flat": _flat, "granite": _granite}
