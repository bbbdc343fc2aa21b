"""`transformers` in float32 with linear layers that round as a format and its kernel do."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import kernels
from engine import LLM, SamplingParams
from tests.engine.checkpoints.folders import FILE, Pair
from tests.engine.models import read_model
from tests.kernels.test_coded_linear import multiplies_bf16

Inputs = Literal["bytes", "float8", "floats"]
Weights = Callable[[Mapping[str, Tensor], Tensor], Tensor]
"""From a layer's stored tensors and the weight [N, K] that they stand for to what is kept of it."""

#: Most neighbours that share a scale in a kernel, and what their number is a multiple of.
_MAX_PART, _PART = 256, 16
#: What sums of float32 in another order change, in steps of a rounding, lies far below.
_EDGE = 1e-4
_TRIES = 100


def as_they_are(stored: Mapping[str, Tensor], weight: Tensor) -> Tensor:
    """Scales that float16 holds, and forms with float32 scales."""
    return weight


@dataclass(frozen=True, slots=True)
class Rounding:
    """What of a linear layer is rounded, and how.

    Attributes:
        inputs: "bytes": to whole 127ths of the largest of a group, for each row; "float8": to
            bfloat16 where the CPU multiplies pairs of it, else as bytes; "floats": not at all.
        group: neighbours that share a scale in the checkpoint; None: all of a row.
        weights: what the kernels keep of the weights.
        sorted_: columns are brought together by `g_idx` first.
        compiled: only the compiled kernels keep weights so; without them they are as they are.
    """

    inputs: Inputs = "bytes"
    group: int | None = 32
    weights: Weights = as_they_are
    sorted_: bool = False
    compiled: bool = False


class Edges:
    """How near to a half any activation came: what lies there goes either way in float32."""

    def __init__(self) -> None:
        self.minimum = 0.5

    def record(self, off: Tensor) -> None:
        """What rounding took away, in parts of its steps."""
        self.minimum = min(self.minimum, 0.5 - float(off.abs().max()))


class RoundedLinear(nn.Module):
    """y = rounded(x) W^T in float32."""

    def __init__(self, weight: Tensor, inputs: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.inputs = weight, inputs

    def forward(self, x: Tensor) -> Tensor:
        return self.inputs(x) @ self.weight.T


def shared(group: int | None, width: int) -> int:
    """Neighbours of a row that share a scale in the kernels: as many of a group as they can."""
    size = width if group is None else math.gcd(group, width)
    return next(part for part in range(_MAX_PART, 0, -_PART) if size % part == 0)


def rounded_inputs(
    rounding: Rounding, stored: Mapping[str, Tensor], width: int, edges: Edges
) -> Callable[[Tensor], Tensor]:
    """What is done to x [..., width] before it meets the weights."""
    if rounding.inputs == "floats":
        return lambda x: x
    if rounding.inputs == "float8" and pairs_of_bf16():
        return lambda x: to_bf16(x, edges)
    group = shared(rounding.group, width)
    index = stored["g_idx"] if rounding.sorted_ else torch.arange(width)
    order = torch.argsort(index, stable=True)
    return lambda x: to_bytes(x[..., order], group, edges)[..., torch.argsort(order)]


def to_bytes(x: Tensor, group: int, edges: Edges) -> Tensor:
    """x as whole 127ths of the largest of each group."""
    grouped = x.unflatten(-1, (-1, group))
    largest = grouped.abs().amax(-1, keepdim=True)
    steps = grouped * torch.where(largest > 0, 127 / largest, 0.0)
    edges.record(steps - steps.round())
    return (steps.round() * (largest / 127)).flatten(-2)


def to_bf16(x: Tensor, edges: Edges) -> Tensor:
    rounded = x.bfloat16().float()
    step = torch.exp2(x.abs().clamp(min=1e-30).log2().floor() - 7)
    edges.record((x - rounded) / step)
    return rounded


def pairs_of_bf16() -> bool:
    """Whether floats of eight bits meet inputs rounded to bfloat16 on this machine."""
    return multiplies_bf16(kernels.get("cpu"))


class RoundedModel:
    """The plain checkpoint's model with a format's rounding; `inputs`: activations', too."""

    def __init__(self, pair: Pair, rounding: Rounding, *, inputs: bool) -> None:
        self.edges = Edges()
        self._outputs: dict[tuple[int, ...], tuple[list[int], Tensor]] = {}
        self._model = copy.deepcopy(read_model(pair.dense))
        stored = load_file(pair.packed / FILE)
        layers = {}
        for module, weight in pair.weights.items():
            prefix = f"{module}."
            parts = {
                name.removeprefix(prefix): t
                for name, t in stored.items()
                if name.startswith(prefix)
            }
            how = rounding if inputs else Rounding("floats")
            initial = rounded_inputs(how, parts, weight.shape[1], self.edges)
            round_weight = as_they_are if rounding.compiled and not inputs else rounding.weights
            layers[module] = RoundedLinear(round_weight(parts, weight), initial)
        self._install(self._model, layers)

    def _install(self, model: nn.Module, layers: Mapping[str, RoundedLinear]) -> None:
        """Put them, by their names, into the places that they are for."""
        for module, layer in layers.items():
            model.set_submodule(module, layer)

    def greedy(self, prompt: list[int], count: int) -> tuple[list[int], Tensor]:
        """Tokens, and the logits [count, vocab] that each is chosen from."""
        if (*prompt, count) not in self._outputs:
            self._say(prompt, count)
        return self._outputs[*prompt, count]

    def _say(self, prompt: list[int], count: int, edge: float = -1.0) -> bool:
        """Whether no activation lay so near to an edge; what comes then isn't looked for."""
        ids, rows = list(prompt), []
        self.edges.minimum = 0.5
        for _ in range(count):
            with torch.no_grad():
                rows.append(self._model(torch.tensor([ids])).logits[0, -1])
            if self.edges.minimum <= edge:
                return False
            ids.append(int(rows[-1].argmax()))
        self._outputs[*prompt, count] = ids[len(prompt) :], torch.stack(rows)
        return True

    def clear_prompt(self, length: int, count: int) -> list[int]:
        """One of which no activation lies at an edge."""
        draw = torch.Generator().manual_seed(7)
        for _ in range(_TRIES):
            prompt: list[int] = torch.randint(4, 380, (length,), generator=draw).tolist()
            if self._say(prompt, count, _EDGE):
                return prompt
        raise AssertionError("every prompt has an activation that could go either way")


def logits_of(llm: LLM, prompt: list[int], count: int) -> tuple[list[int], Tensor]:
    """Greedy tokens, and the logits [count, vocab] that each was chosen from."""
    seen: list[Tensor] = []

    def see(_: list[int], logits: Tensor) -> Tensor:
        seen.append(logits.clone())
        return logits

    params = SamplingParams(
        temperature=0, max_tokens=count, ignore_eos=True, logits_processors=[see]
    )
    token_ids = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
    return list(token_ids), torch.stack(seen)


# -- what is kept of weights ----------------------------------------------------------------------


def half(scales: Tensor) -> Tensor:
    return scales.half().float()


def _wide(scales: Tensor, width: int) -> Tensor:
    """[N, groups] for each column."""
    return scales.repeat_interleave(width // scales.shape[1], 1)


def half_scales(scales_of: Callable[[Mapping[str, Tensor]], Tensor]) -> Weights:
    """Scales [N, groups] are kept in float16."""

    def round_weight(stored: Mapping[str, Tensor], weight: Tensor) -> Tensor:
        scales = scales_of(stored).float()
        return weight / _wide(scales, weight.shape[1]) * _wide(half(scales), weight.shape[1])

    return round_weight


def half_minima(stored: Mapping[str, Tensor], weight: Tensor) -> Tensor:
    """HQQ's: what zero points that aren't whole take away is kept in float16."""
    scale, zero = (stored[name].float().view(len(weight), -1) for name in ("scale", "zero"))
    return weight + _wide(scale * zero - half(scale * zero), weight.shape[1])


def half_points(stored: Mapping[str, Tensor], weight: Tensor) -> Tensor:
    """HQQ's of 8 bits: zero points, counted from the middle, are kept in float16."""
    scale, zero = (stored[name].float().view(len(weight), -1) for name in ("scale", "zero"))
    lost = half(zero - 128) - (zero - 128)
    return weight - _wide(scale * lost, weight.shape[1])


def float8_words(stored: Mapping[str, Tensor], weight: Tensor) -> Tensor:
    """e4m3: multiples of 2^-5 where the CPU has no pairs of bfloat16."""
    codes = stored["weight"].float()
    retained_codes = codes if pairs_of_bf16() else (codes * 32 + 0.5).floor() / 32
    return weight * torch.where(codes == 0, 1.0, retained_codes / codes)


def table_words(stored: Mapping[str, Tensor], weight: Tensor) -> Tensor:
    """bitsandbytes' entries: whole 32767ths of the largest."""
    table, packed = stored["weight.quant_map"], stored["weight"].flatten().view(torch.uint8)
    codes = torch.stack((packed >> 4, packed & 15), -1).view(weight.shape).long()
    levels = (table / table.abs().max() * 32767).round() / 32767 * table.abs().max()
    return weight * torch.where(table == 0, 1.0, levels / table)[codes]
