"""Reads experts' weights in the layouts of checkpoints.

Every layout is converted to gate over up [2 I, H] and down [H, I] for each expert.

- "split": one tensor per expert and projection, or, without these, `gate_up_proj` [E, 2 I, H] and
  `down_proj` [E, H, I];
- "interleaved" (gpt-oss): `gate_up_proj` [E, H, 2 I] with alternating gate and up, `down_proj`
  [E, I, H], each with a bias;
- "flat" (DBRX): `w1`, `v1` and `w2`, each [E I, H];
- "transposed" (Qwen3-VL): `gate_up_proj` [E, H, 2 I] and `down_proj` [E, I, H], or the fused
  tensors of "split";
- "granite": `input_linear` [E, 2 I, H] and `output_linear` [E, H, I]; in GGUF files like "split".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from engine.contract.errors import ModelLoadError
from engine.models.decoder_spec import DecoderSpec, MoeSpec
from engine.quantization.packing import WeightSource
from kernels import KernelSet, LinearLayer
from kernels.interface import ActivationSpec, MixtureOfExperts, MlpWeights
from kernels.layers import gated_activation
from kernels.lora import MoeLoraMapping, SharedExpertLora

ExpertWeights = tuple[Tensor, Tensor | None, Tensor, Tensor | None]
"""gate over up, its bias, down, its bias."""


class Weights(Protocol):
    """Source of tensors: a checkpoint or a generator of random ones."""

    def __contains__(self, name: str) -> bool: ...

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the named tensor, which must have this shape."""

    def matrix(self, name: str, shape: tuple[int, int]) -> WeightSource:
        """Return the named matrix as a source whose rows can be read in parts."""

    def release(self) -> None:
        """Release the memory of tensors read from files; results stay valid."""


def read_experts(
    weights: Weights, layer: str, moe: MoeSpec, hidden: int
) -> Iterator[ExpertWeights]:
    """Yield each expert of a layer; `layer` is the prefix of the layer's names."""
    return _LAYOUTS[moe.layout](weights, layer + moe.experts, moe, hidden)


def split_experts(layer: str, moe: MoeSpec) -> str:
    """Return the prefix of an expert's index in layouts with separate tensors; else ""."""
    first = layer + moe.experts
    return {"split": first, "granite": f"{first}experts."}.get(moe.layout, "")


def _split(weights: Weights, prefix: str, moe: MoeSpec, hidden: int) -> Iterator[ExpertWeights]:
    inner = moe.intermediate_size
    if (
        f"{prefix}0.{moe.expert_names[0]}.weight" not in weights
        and f"{prefix}gate_up_proj" in weights
    ):
        yield from _fused(weights, f"{prefix}gate_up_proj", f"{prefix}down_proj", moe, hidden)
        return
    for expert in range(moe.num_experts):
        gate, up, down = (f"{prefix}{expert}.{name}.weight" for name in moe.expert_names)
        both = [weights.get(name, (inner, hidden)) for name in (gate, up)]
        yield torch.cat(both), None, weights.get(down, (hidden, inner)), None


def _granite(weights: Weights, prefix: str, moe: MoeSpec, hidden: int) -> Iterator[ExpertWeights]:
    if f"{prefix}experts.0.{moe.expert_names[0]}.weight" in weights:
        return _split(weights, f"{prefix}experts.", moe, hidden)
    return _fused(
        weights, f"{prefix}input_linear.weight", f"{prefix}output_linear.weight", moe, hidden
    )


def _fused(
    weights: Weights, up: str, down: str, moe: MoeSpec, hidden: int
) -> Iterator[ExpertWeights]:
    count, inner = moe.num_experts, moe.intermediate_size
    gate_ups = weights.get(up, (count, 2 * inner, hidden))
    downs = weights.get(down, (count, hidden, inner))
    for expert in range(count):
        yield gate_ups[expert], None, downs[expert], None


def _interleaved(
    weights: Weights, prefix: str, moe: MoeSpec, hidden: int
) -> Iterator[ExpertWeights]:
    count, inner = moe.num_experts, moe.intermediate_size
    gate_ups = weights.get(f"{prefix}gate_up_proj", (count, hidden, 2 * inner))
    up_biases = weights.get(f"{prefix}gate_up_proj_bias", (count, 2 * inner))
    downs = weights.get(f"{prefix}down_proj", (count, inner, hidden))
    down_biases = weights.get(f"{prefix}down_proj_bias", (count, hidden))
    for expert in range(count):
        rows, bias = gate_ups[expert].T, up_biases[expert]
        gate_up = torch.cat((rows[::2], rows[1::2]))
        yield gate_up, torch.cat((bias[::2], bias[1::2])), downs[expert].T, down_biases[expert]


def _flat(weights: Weights, prefix: str, moe: MoeSpec, hidden: int) -> Iterator[ExpertWeights]:
    count, inner = moe.num_experts, moe.intermediate_size
    gate, up, down = (
        weights.get(f"{prefix}{name}", (count * inner, hidden)).view(count, inner, hidden)
        for name in moe.expert_names
    )
    for expert in range(count):
        yield torch.cat((gate[expert], up[expert])), None, down[expert].T, None


def _transposed(
    weights: Weights, prefix: str, moe: MoeSpec, hidden: int
) -> Iterator[ExpertWeights]:
    count, inner = moe.num_experts, moe.intermediate_size

    def read(name: str, rows: int, columns: int) -> Tensor:
        try:  # `transformers` transposes tensors of the other shape
            return weights.get(prefix + name, (count, rows, columns))
        except ModelLoadError:
            return weights.get(prefix + name, (count, columns, rows)).transpose(1, 2)

    gate_ups, downs = read("gate_up_proj", 2 * inner, hidden), read("down_proj", hidden, inner)
    for expert in range(count):
        yield gate_ups[expert], None, downs[expert], None


_LAYOUTS = {
    "split": _split,
    "interleaved": _interleaved,
    "flat": _flat,
    "granite": _granite,
    "transposed": _transposed,
}


FUSED_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def fuses_experts(ops: KernelSet, spec: DecoderSpec, quantized: bool) -> bool:
    """Return whether the kernels run all experts at once: gated, unquantized, known activation."""
    supported = spec.gated and spec.activation in FUSED_ACTIVATIONS
    return ops.fuses_experts and supported and not quantized


def _stacked(
    experts: Iterable[ExpertWeights], count: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor | None]:
    """Stack each of an expert's four tensors for all experts: [count, ...]; biases are float32.

    Only one expert at a time takes memory on the host.
    """
    stacks: list[Tensor | None] = [None] * 4
    for index, expert in enumerate(experts):
        for part_index, part in enumerate(expert):
            if part is None:
                continue
            stack = stacks[part_index]
            if stack is None:
                stack_dtype = torch.float32 if part_index % 2 else dtype
                stack = torch.empty((count, *part.shape), dtype=stack_dtype, device=device)
                stacks[part_index] = stack
            stack[index].copy_(part)
    return stacks


class GroupedMoe(MixtureOfExperts):
    """Weighted sum of the chosen experts' outputs without synchronizing with the device.

    Args:
        experts: weights, which are stacked in `dtype` on the kernels' device one by one.
        moe: the number of experts, and their routing.
        activation: one of `FUSED_ACTIVATIONS`.
        shared: the expert for every token; the sigmoid of `shared_gate` is its weight.
        choice_bias: float32 [experts], added to the scores for choosing experts only.
    """

    def __init__(
        self,
        ops: KernelSet,
        router: LinearLayer,
        experts: Iterable[ExpertWeights],
        moe: MoeSpec,
        dtype: torch.dtype,
        activation: str,
        shared: MlpWeights | None = None,
        shared_gate: LinearLayer | None = None,
        choice_bias: Tensor | None = None,
    ) -> None:
        up, self._up_bias, down, self._down_bias = _stacked(
            experts, moe.num_experts, dtype, ops.device
        )
        if up is None or down is None:
            raise ValueError("a mixture of no experts")
        self._up, self._down = up, down
        self._ops, self._router, self._moe = ops, router, moe
        self._shared, self._choice_bias = shared, choice_bias
        self._act = gated_activation(ops, ActivationSpec(activation))
        self._shared_gate = shared_gate
        self._linears = {"router": router}
        if shared is not None:
            self._linears |= {"shared.up": shared.up, "shared.down": shared.down}
        if shared_gate is not None:
            self._linears["shared.gate"] = shared_gate
        self._activation = activation
        read = self._up.nbytes + self._down.nbytes
        self.nbytes = read * moe.top_k // moe.num_experts + router.nbytes
        self.nbytes += sum(part.nbytes for part in (shared, shared_gate) if part is not None)

    def tensors(self) -> dict[str, Tensor]:
        stacks = {
            "gate_up": self._up,
            "gate_up_bias": self._up_bias,
            "down": self._down,
            "down_bias": self._down_bias,
            "choice_bias": self._choice_bias,
        }
        tensors = {name: tensor for name, tensor in stacks.items() if tensor is not None}
        for name, layer in self._linears.items():
            tensors |= {f"{name}.{part}": tensor for part, tensor in layer.tensors().items()}
        return tensors

    def shared_linears(self) -> dict[str, LinearLayer]:
        return {slot.replace(".", "_"): layer for slot, layer in self._linears.items()}

    def __call__(self, x: Tensor) -> Tensor:
        return self._run(x, None)

    def forward_with_slots(self, x: Tensor, rows: MoeLoraMapping) -> Tensor:
        return self._run(x, rows)

    def _run(self, x: Tensor, lora: MoeLoraMapping | None) -> Tensor:
        moe, every = self._moe, SharedExpertLora(lora)
        weights, ids = self._ops.route(
            every("router", self._router, x),
            moe.top_k,
            softmax_first=moe.softmax_first,
            renormalize=moe.renormalize,
            sigmoid=moe.sigmoid,
            choice_bias=self._choice_bias,
            scale=moe.scale,
            groups=moe.groups,
            top_groups=moe.top_groups,
            group_best=moe.group_best,
        )
        out = self._ops.fused_experts(
            x,
            self._up,
            self._down,
            weights,
            ids,
            activation=self._activation,
            gate_up_bias=self._up_bias,
            down_bias=self._down_bias,
            lora=lora,
        )
        shared, gate = self._shared, self._shared_gate
        if shared is None:
            return out
        shared_out = every("shared_down", shared.down, self._act(every("shared_up", shared.up, x)))
        if gate is not None:
            shared_out = torch.sigmoid(every("shared_gate", gate, x)) * shared_out
        return out.add_(shared_out)
