"""Which layers share a block: KV cache groups by attention type, all with the same page size.

A block holds `block_size` tokens of `layers_per_block` layers. Layers that need the same blocks of
a sequence form a group and share its block table; all groups take blocks from one pool. Only layers
that carry a state have a separate pool, whose blocks hold one state each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

#: Which blocks layers need: those of all tokens, of the last tokens, of an encoder's states, or one
#: state.
KVCacheKind = Literal["full", "window", "cross", "state"]

#: Maximum padding as a fraction of a block set, if a smaller block would have less.
_MAX_PADDING = 0.15


@dataclass(frozen=True, slots=True)
class KVCacheGroupSpec:
    """Layers with a common block table per sequence, whose length is specific to the group.

    Attributes:
        kind: which blocks its layers need.
        layers: their indices; the i-th is in the i-th layer slot of a block. () for all layers that
            carry a state.
        window: number of tokens that a token attends to, including itself; 0: all.
        encoder_length: most encoder states that a token attends to; 0: other kinds.
        num_blocks: size of the group's separate pool; 0: its blocks are in the common pool.
    """

    kind: KVCacheKind
    layers: tuple[int, ...]
    window: int = 0
    encoder_length: int = 0
    num_blocks: int = 0

    def table_length(self, num_tokens: int, block_size: int) -> int:
        """Maximum length of the block table of a sequence of `num_tokens`."""
        if self.kind == "state":
            return 1
        return -(-(self.encoder_length or num_tokens) // block_size)

    def first_needed_block(self, num_computed: int, block_size: int) -> int:
        """Index of the first block that the token after `num_computed` computed ones attends to."""
        if not self.window:
            return 0
        return max(0, num_computed - self.window + 1) // block_size

    def num_required_blocks(self, block_size: int) -> int | None:
        """Number of blocks before a block's first token that a prefix ending there requires; None:
        all.
        """
        if self.kind == "state":
            return 1
        return -(-(self.window - 1) // block_size) if self.window else None

    def max_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        """Maximum number of blocks of the common pool for a sequence that grows to `num_tokens` by
        `chunk` per step.

        A step writes the keys of all of its `chunk` tokens before it reads any, so they add to a
        sliding window, which may also begin and end within a block.
        """
        if self.num_blocks:
            return 0
        length = self.table_length(num_tokens, block_size)
        if not self.window:
            return length
        return min(length, -(-(self.window - 1 + chunk) // block_size) + 1)


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The KV cache groups of a model.

    Attributes:
        groups: full attention first, cross attention and states last.
        layers_per_block: number of layer slots of a block; smaller groups leave some empty.
    """

    groups: tuple[KVCacheGroupSpec, ...]
    layers_per_block: int

    @property
    def windows(self) -> tuple[int, ...]:
        """Window of each group."""
        return tuple(group.window for group in self.groups)

    @property
    def num_layers(self) -> int:
        """Number of layers of the model."""
        return sum(len(group.layers) for group in self.groups)

    @property
    def state_group(self) -> KVCacheGroupSpec | None:
        """The group of the layers that carry a state; None: there are none, or not in blocks."""
        return self.groups[-1] if self.groups[-1].kind == "state" else None

    def with_states(self, num_blocks: int) -> KVCacheConfig:
        """This layout with a group of layers that carry a state, with room for `num_blocks`
        states.
        """
        states = KVCacheGroupSpec("state", (), num_blocks=num_blocks)
        return replace(self, groups=(*self.groups, states))

    def table_lengths(self, num_tokens: int, block_size: int) -> list[int]:
        """Length of each group's block table for a sequence of `num_tokens`, except for states."""
        return [
            group.table_length(num_tokens, block_size)
            for group in self.groups
            if group.kind != "state"
        ]

    def max_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        """Maximum number of blocks of a sequence that grows to `num_tokens` by `chunk` per step."""
        return sum(group.max_blocks(num_tokens, chunk, block_size) for group in self.groups)

    def group_by_layer(self) -> list[int]:
        """Group index of each layer."""
        return [group for _, group, _ in sorted(self._layer_slots())]

    def slot_by_layer(self) -> list[int]:
        """Layer slot of each layer in its block."""
        return [slot for _, _, slot in sorted(self._layer_slots())]

    def _layer_slots(self) -> list[tuple[int, int, int]]:
        """(layer, group, slot) of all layers."""
        return [
            (layer, index, slot)
            for index, group in enumerate(self.groups)
            for slot, layer in enumerate(group.layers)
        ]


def single_group_config(num_layers: int, window: int = 0) -> KVCacheConfig:
    """A layout with all layers in one group."""
    return KVCacheConfig((make_group(window, range(num_layers)),), num_layers)


def make_group(window: int, layers: Sequence[int]) -> KVCacheGroupSpec:
    """A group of attention layers; `window`: 0 for full attention."""
    return KVCacheGroupSpec("window" if window else "full", tuple(layers), window)


def with_cross_attention(layout: KVCacheConfig, encoder_length: int) -> KVCacheConfig:
    """The layout of a decoder with cross attention, whose keys and values have additional layers,
    numbered after the others.
    """
    layers = range(layout.num_layers, 2 * layout.num_layers)
    size = layout.layers_per_block
    groups = [
        KVCacheGroupSpec("cross", tuple(layers[first : first + size]), 0, encoder_length)
        for first in range(0, len(layers), size)
    ]
    return KVCacheConfig((*layout.groups, *groups), size)


def make_kv_cache_config(
    windows: Sequence[int], num_layers: int, max_model_len: int, hybrid: bool = True
) -> KVCacheConfig:
    """The KV cache layout of a model.

    Args:
        windows: sliding window of each layer, 0 for full attention; (): all are full.
        num_layers: number of layers of the model.
        max_model_len: a window that is at least as long is full attention.
        hybrid: if False, every layer keeps all of its blocks.
    """
    if not hybrid or not windows:
        return single_group_config(num_layers)
    types: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        types.setdefault(window if window < max_model_len else 0, []).append(layer)
    size = _layers_per_block([len(layers) for layers in types.values()])
    groups = [
        make_group(window, layers[first : first + size])
        for window, layers in sorted(types.items())
        for first in range(0, len(layers), size)
    ]
    return KVCacheConfig(tuple(groups), size)


def _layers_per_block(counts: list[int]) -> int:
    """Number of layers per block, from the number of layers of each attention type.

    That of the most frequent type, else of the least frequent, else the largest divisor of that:
    the first with little padding. Large blocks mean few groups, and so few tables to maintain.
    """
    min_layers = min(counts)
    divisors = [size for size in range(min_layers, 0, -1) if min_layers % size == 0]
    for size in (max(counts), *divisors):
        slots = sum(-(-count // size) * size for count in counts)
        if 1 - sum(counts) / slots <= _MAX_PADDING:
            return size
    return 1
