"""Which linear layers of a decoder's layer adapters may change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.models.description import LinearDescription
from engine.models.layer_weights import AttentionWeights, LatentWeights, LayerWeights
from kernels import KernelSet, LinearLayer
from kernels.lora_slots import EMBEDDING, EMBEDDING_ROWS, EXPERTS, HEAD, LoraSlots

#: Parts of a linear layer, at most, of which each has an adapter's ranks to itself; else 1.
_PARTS = {"qkv": 3, "latent_in": 2, "up": 2, "residual_up": 2, "shared_up": 2, EXPERTS["up"]: 2}


def linears_of(weights: LayerWeights) -> dict[str, LinearLayer]:
    """Those that every token goes through, by their slots."""
    meeting = weights.attention
    if isinstance(meeting, AttentionWeights):
        found = {"qkv": meeting.qkv, "o": meeting.o}
    elif isinstance(meeting, LatentWeights):
        found = {"latent_in": meeting.inputs, "o": meeting.o}
        if meeting.queries is not None:
            found["latent_q"] = meeting.queries
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


@dataclass(frozen=True, slots=True)
class StackedExpert:
    """One expert's layer where all of them are one tensor: it is run with the others alone.

    Attributes:
        in_features, out_features: as of a `LinearLayer`.
    """

    in_features: int
    out_features: int


#: What an adapter changes: a layer that can be asked for its weights, or the sizes of one.
AdaptableLinear = LinearLayer | StackedExpert


def stacked_linears(
    weights: LayerWeights, experts: Mapping[str, LinearDescription]
) -> dict[str, AdaptableLinear]:
    """Those of a mixture whose experts run together; `experts`: each one's, by their slots."""
    every = {} if weights.experts is None else weights.experts.of_all_rows()
    return every | {
        slot: StackedExpert(linear.columns, linear.rows) for slot, linear in experts.items()
    }


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
