"""The state that a sequence keeps beside keys and values: of state-space layers, linear attention
and short convolutions.

`transformers` keeps it in its cache's `LinearAttentionLayer`s. A sequence has such a cache of its
own; decode steps of several sequences run as one batch, whose states are theirs put together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers import cache_utils as caches

#: Layers with keys and values only or nothing at all, and layers with states.
_STATELESS = (caches.DynamicLayer, caches.DynamicSlidingWindowLayer, caches.DummyLayer)
_LINEAR = (
    caches.LinearAttentionLayer,
    caches.LinearAttentionAndFullAttentionLayer,
    caches.LinearAttentionAndSlidingWindowAttentionLayer,
)


class StateCache(DynamicCache):
    """A cache whose keys and values are kept elsewhere: attention gets those of the step alone.

    Attributes:
        num_tokens: how many tokens the sequence has computed.
    """

    num_tokens = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The step's keys and values as they are."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before this step's."""
        return self.num_tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(tokens that a mask covers, the first of them)."""
        return self.num_tokens + query_length, 0

    @property
    def linear_layers(self) -> Iterator[tuple[int, Any]]:
        """(index, layer) of those that keep a state."""
        return ((at, layer) for at, layer in enumerate(self.layers) if isinstance(layer, _LINEAR))

    @property
    def num_elements(self) -> int:
        """Elements of all states."""
        return sum(tensor.numel() for _, layer in self.linear_layers for tensor in _states(layer))


def unknown_layers(cache: StateCache) -> set[str]:
    """Kinds of layers that keep something which the bridge doesn't know."""
    known = (*_STATELESS, *_LINEAR)
    return {type(layer).__name__ for layer in cache.layers if type(layer) not in known}


def gather(parts: list[StateCache], batch: StateCache) -> StateCache:
    """`batch`, a new cache, with the states of `parts` as its rows."""
    for at, layer in batch.linear_layers:
        rows: list[Any] = [part.layers[at] for part in parts]
        layer.device, layer.dtype = rows[0].device, rows[0].dtype
        for name in ("conv_kernel_size", "has_previous_state"):
            setattr(layer, name, dict(getattr(rows[0], name)))
        for name in ("conv_states", "recurrent_states"):
            setattr(layer, name, {s: _join(rows, name, s) for s in range(layer.number_of_states)})
            initialized = f"is_{name}_initialized"
            setattr(layer, initialized, dict(getattr(rows[0], initialized)))
    return batch


def scatter(batch: StateCache, parts: list[StateCache]) -> None:
    """Give each of `parts` its row of the batch's states."""
    for at, layer in batch.linear_layers:
        for name in ("conv_states", "recurrent_states"):
            for index, tensor in getattr(layer, name).items():
                if tensor is not None:
                    for row, part in enumerate(parts):
                        getattr(part.layers[at], name)[index] = tensor[row : row + 1]


def _join(rows: list[Any], name: str, index: int) -> Tensor | None:
    tensors = [getattr(row, name)[index] for row in rows]
    return None if tensors[0] is None else torch.cat(tensors)


def _states(layer: Any) -> list[Tensor]:
    both = (*layer.conv_states.values(), *layer.recurrent_states.values())
    return [tensor for tensor in both if tensor is not None]
