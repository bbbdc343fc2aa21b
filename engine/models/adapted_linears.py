"""Which linear layers of a decoder's layer adapters may change."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.models.layer_weights import LayerWeights
from kernels import KernelSet, LinearLayer
from kernels.lora_slots import EMBEDDING, EMBEDDING_ROWS, HEAD, LoraSlots

#: Parts of a linear layer, at most, of which each has an adapter's ranks to itself; else 1.
_PARTS = {"qkv": 3, "up": 2, "residual_up": 2}


def linears_of(weights: LayerWeights) -> dict[str, LinearLayer]:
    """Those that every token goes through, by their slots."""
    found = {"qkv": weights.attention.qkv, "o": weights.attention.o}
    for prefix, mlp in (("", weights.mlp), ("residual_", weights.residual_mlp)):
        if mlp is not None:
            found |= {f"{prefix}up": mlp.up, f"{prefix}down": mlp.down}
    return found


def expert_linears(weights: LayerWeights) -> dict[str, LinearLayer]:
    """Those of a mixture, where they run one by one."""
    experts = weights.experts
    return {} if experts is None or experts.layers is None else experts.layers.linears()


def make_slots(
    ops: KernelSet, layers: Sequence[LayerWeights], most: int, most_rank: int, dtype: torch.dtype
) -> LoraSlots | None:
    """Slots for `most` adapters of these layers, of the embedding and of the output layer, each
    part of up to that rank; None: the kernels have no slots. `dtype`: of the layers' weights.
    """
    places = {
        (index, slot): _PARTS.get(slot, 1)
        for index, weights in enumerate(layers)
        for slot in linears_of(weights)
    }
    places |= {(len(layers), end): 1 for end in (EMBEDDING, EMBEDDING_ROWS, HEAD)}
    return ops.lora_slots(places, most, most_rank, ops.activation_dtype(dtype))
