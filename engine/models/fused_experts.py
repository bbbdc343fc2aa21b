"""A mixture of experts in two grouped products, where the kernels have them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from engine.models.experts import ExpertWeights
from engine.models.layer_weights import MlpWeights
from engine.models.spec import DecoderSpec, MoeSpec
from kernels import KernelSet, LinearLayer
from kernels.activations import gated_activation
from kernels.interface import ActivationSpec, MixtureOfExperts
from kernels.lora_slots import AllRows, MixtureRows

FUSED_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def fuses_experts(ops: KernelSet, spec: DecoderSpec, quantized: bool) -> bool:
    """Whether the kernels run all experts at once: unquantised ones, of known activations."""
    known = spec.gated and spec.activation in FUSED_ACTIVATIONS
    return ops.fuses_experts and known and not quantized


def _stacked(
    experts: Iterable[ExpertWeights], count: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor | None]:
    """Each of the four tensors of an expert, for all of them: [count, ...]; biases in float32.

    Of the host's memory only one expert is taken at a time.
    """
    found: list[Tensor | None] = [None] * 4
    for index, expert in enumerate(experts):
        for place, part in enumerate(expert):
            if part is None:
                continue
            whole = found[place]
            if whole is None:
                kept = torch.float32 if place % 2 else dtype
                whole = torch.empty((count, *part.shape), dtype=kept, device=device)
                found[place] = whole
            whole[index].copy_(part)
    return found


class FusedExperts(MixtureOfExperts):
    """Sum of the chosen experts' outputs, by the router's weights, without asking the device.

    Args:
        experts: one after the other, stacked in `dtype` on the kernels' device as they come.
        moe: how many there are, and how tokens are sent to them.
        activation: one of `FUSED_ACTIVATIONS`.
        shared: the expert that every token goes through; `shared_gate` weighs it by its sigmoid.
        choice_bias: float32 [experts], by which they are chosen beside their scores.
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
        """See `MixtureOfExperts.tensors`."""
        held = {
            "gate_up": self._up,
            "gate_up_bias": self._up_bias,
            "down": self._down,
            "down_bias": self._down_bias,
            "choice_bias": self._choice_bias,
        }
        found = {name: tensor for name, tensor in held.items() if tensor is not None}
        for name, layer in self._linears.items():
            found |= {f"{name}.{part}": tensor for part, tensor in layer.tensors().items()}
        return found

    def of_all_rows(self) -> dict[str, LinearLayer]:
        """See `MixtureOfExperts.of_all_rows`."""
        return {slot.replace(".", "_"): layer for slot, layer in self._linears.items()}

    def __call__(self, x: Tensor) -> Tensor:
        """See `MixtureOfExperts.__call__`."""
        return self._run(x, None)

    def slotted(self, x: Tensor, rows: MixtureRows) -> Tensor:
        """See `MixtureOfExperts.slotted`."""
        return self._run(x, rows)

    def _run(self, x: Tensor, lora: MixtureRows | None) -> Tensor:
        moe, every = self._moe, AllRows(lora)
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
        said = every("shared_down", shared.down, self._act(every("shared_up", shared.up, x)))
        if gate is not None:
            said = torch.sigmoid(every("shared_gate", gate, x)) * said
        return out.add_(said)
