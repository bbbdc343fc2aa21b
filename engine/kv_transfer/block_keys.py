"""`BlockKeys`: keys of a sequence's blocks in the tiers, and which blocks a prefix needs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.kv_cache.kv_cache_config import KVCacheConfig
from engine.kv_cache.prefix_cache import HitRequirement, group_key, longest_common_hit
from engine.kv_transfer.base import RequestView


class KeyedBlock(NamedTuple):
    """A block of the KV cache that is saved or loaded.

    Attributes:
        group: KV cache group.
        position: in the sequence's block table.
        keys: of its payloads in the tiers.
    """

    group: int
    position: int
    keys: list[bytes]


class BlockKeys:
    """Keys by all that a block's bytes depend on.

    A block of states is named by the tokens that the state has taken in.
    """

    def __init__(
        self, numerics: bytes, layout: KVCacheConfig, block_size: int, num_payloads: Sequence[int]
    ) -> None:
        """
        Args:
            numerics: sha256 of the model and of all else that decides a block's bytes but for its
                tokens, namespace and adapter.
            layout: the KV cache groups.
            block_size: tokens of a block.
            num_payloads: payloads of a block, by group.
        """
        self._numerics, self._groups, self._block_size = numerics, layout.groups, block_size
        self._num_payloads = list(num_payloads)
        # A single group's hashes need no group.
        is_single = len(layout.groups) == 1
        self._suffixes = [
            b"" if is_single else group_key(index) for index in range(len(layout.groups))
        ]
        self._group_of = {suffix: index for index, suffix in enumerate(self._suffixes)}
        self._requirements = [
            HitRequirement(group.num_required_blocks(block_size), (suffix,))
            for group, suffix in zip(layout.groups, self._suffixes, strict=True)
            if group.kind != "cross"
        ]

    def first_key(self, cached_hash: bytes) -> bytes:
        """Key of the first payload of a block with this key in the prefix cache."""
        return hashlib.sha256(self._numerics + cached_hash).digest()

    def first_keys(self, block_hash: bytes) -> list[bytes]:
        """The same for a block's tokens in each group."""
        return [self.first_key(block_hash + suffix) for suffix in self._suffixes]

    def of_block(self, group: int, block_hash: bytes) -> list[bytes]:
        """Keys of a group's block; [] where the group has no layers."""
        if not self._num_payloads[group]:
            return []
        first = self.first_key(block_hash + self._suffixes[group])
        return [
            first,
            *(
                hashlib.sha256(first + _number(number)).digest()
                for number in range(1, self._num_payloads[group])
            ),
        ]

    def blocks_of(self, request: RequestView, start: int, end: int) -> list[KeyedBlock]:
        """The blocks that a sequence with its first `start` tokens' blocks needs to go on after
        `end` tokens, in the order of their tokens. Its last one may be filled in part.
        """
        size, token_ids = self._block_size, request.token_ids
        hashes = request.block_hashes.hash_full_blocks(token_ids, size)[: end // size]
        if end % size:
            hashes = [*hashes, request.block_hashes.hash_partial_block(token_ids, size, end)]
        return self.blocks_of_hashes(hashes, start, end)

    def blocks_of_hashes(self, hashes: Sequence[bytes], start: int, end: int) -> list[KeyedBlock]:
        """`blocks_of` by the hashes of all blocks up to `end`."""
        size = self._block_size
        blocks: list[tuple[int, KeyedBlock]] = []
        for index, group in enumerate(self._groups):
            if group.kind == "cross":
                continue
            if group.kind == "state":
                keys = self.of_block(index, hashes[-1])
                blocks.append((len(hashes) - 1, KeyedBlock(index, 0, keys)))
                continue
            first = max(start // size, group.first_needed_block(end, size))
            blocks += (
                (position, KeyedBlock(index, position, self.of_block(index, hashes[position])))
                for position in range(first, len(hashes))
            )
        blocks.sort(key=lambda entry: entry[0])
        return [block for _, block in blocks if block.keys]

    def encoder_blocks(self, request: RequestView) -> list[KeyedBlock]:
        """The blocks of the encoder states that a sequence attends to."""
        key, num_blocks = request.encoder_key, -(-request.num_encoder_states // self._block_size)
        return [
            KeyedBlock(index, position, self.of_block(index, key + _number(position)))
            for index, group in enumerate(self._groups)
            if group.kind == "cross"
            for position in range(num_blocks)
        ]

    @property
    def are_all_needed(self) -> bool:
        """Whether a prefix needs the blocks of all of its tokens, not those of its end alone."""
        return all(kind.num_required_blocks is None for kind in self._requirements)

    def longest_hit(self, hashes: Sequence[bytes], is_saved: Callable[[bytes], bool]) -> int:
        """Number of blocks after those that a sequence has which can be loaded.

        Args:
            hashes: of its blocks after those.
            is_saved: whether a tier has a key.
        """

        def is_block_saved(index: int, suffix: bytes) -> bool:
            return all(map(is_saved, self.of_block(self._group_of[suffix], hashes[index])))

        return longest_common_hit(self._requirements, len(hashes), is_block_saved)


def _number(number: int) -> bytes:
    return number.to_bytes(4, "little")
