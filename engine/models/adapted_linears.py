"""Which linear layers of a decoder's layer adapters may change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.models.description import LinearDescription
from engine.models.layer_weights import AttentionWeights, LayerWeights
from kernels import KernelSet, LinearLayer
from kernels.lora_slots import EMBEDDING, EMBEDDING_ROWS, EXPERTS, HEAD, LoraSlots

#: Parts of a linear layer, at most, of which each has an adapter's ranks to itself; else 1.
_PARTS = {"qkv": 3, "up": 2, "residual_up": 2, "shared_up": 2, EXPERTS["up"]: 2}


def linears_of(weights: LayerWeights) -> dict[str, LinearLayer]:
    """Those that every token goes through, by their slots."""
    meeting = weights.attention
    if isinstance(meeting, AttentionWeights):
        found = {"qkv": meeting.qkv, "o": meeting.o}
    else:
        found = {"state_in": meeting.inputs, "state_out": meeting.output}
        if meeting.rates is not None:
            found["state_rates"] = meeting.rates
    for prefix, mlp in (("", weights.mlp), ("residual_", weights.residual_mlp)):
        if mlp is not None:
            found |= {f"{prefix}up": mlp.up, f"{prefix}down": mlp.down}
    return found


def expert_linears(weights: LayerWeights) -> dict[str, LinearLayer]:
    """Those of a mixture, where they run one by one."""
    experts = weights.experts
    return {} if experts is None or experts.layers is None else experts.layers.linears()


class StackedExpert(LinearLayer):
    """One expert's layer where all of them are one tensor: its sizes."""

    def __init__(self, linear: LinearDescription) -> None:
        self.in_features, self.nbytes = linear.columns, 0
        self.out_features = sum(part.rows for part in linear.parts)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `LinearLayer.__call__`."""
        raise NotImplementedError("stacked experts run together")

    def rows(self, ids: Tensor) -> Tensor:
        """See `LinearLayer.rows`."""
        raise NotImplementedError("a stacked expert has no rows of its own")


def stacked_linears(
    weights: LayerWeights, experts: Mapping[str, LinearDescription]
) -> dict[str, LinearLayer]:
    """Those of a mixture whose experts run together; `experts`: each one's, by their slots."""
    every = {} if weights.experts is None else weights.experts.of_all_rows()
    return every | {slot: StackedExpert(linear) for slot, linear in experts.items()}


def slot_places(weights: LayerWeights) -> list[str]:
    """A layer's slots on a device whose steps are recorded."""
    found = list(linears_of(weights))
    if weights.experts is not None:
        found += [*weights.experts.of_all_rows(), *EXPERTS.values()]
    return found


def make_slots(
    ops: KernelSet,
    layers: Sequence[Sequence[str]],
    most: int,
    most_rank: int,
    dtype: torch.dtype,
    experts: int = 0,
) -> LoraSlots | None:
    """Slots for `most` adapters of these layers, each by the names of its linear layers, of the
    embedding and of the output layer, each part of up to that rank; None: the kernels have no
    slots. `dtype`: of the layers' weights. A mixture has so many `experts`.
    """
    places = {
        (index, slot): _PARTS.get(slot, 1) for index, layer in enumerate(layers) for slot in layer
    }
    places |= {(len(layers), end): 1 for end in (EMBEDDING, EMBEDDING_ROWS, HEAD)}
    return ops.lora_slots(places, most, most_rank, ops.activation_dtype(dtype), experts)
