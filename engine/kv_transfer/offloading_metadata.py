"""`OffloadingMetadata`: which blocks a step saves and loads."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.kv_transfer.base import KVConnectorMetadata
from engine.kv_transfer.block_keys import KeyedBlock

#: A block of a plan: its KV cache group, its id there, and its keys in the tiers.
PlannedBlock = tuple[int, int, list[bytes]]
#: A sequence's tenant, its cache namespace, and blocks of it.
SavedBlocks = tuple[str, str, list[PlannedBlock]]


class OffloadingMetadata(KVConnectorMetadata):
    """Attributes:
    step: number of the step whose blocks to load; the connector has them.
    swapped: blocks of preempted sequences, to save before the forward pass.
    saves: blocks that the step fills.
    loads: the blocks to load, for other ranks.
    removed: steps, and the keys that they removed from the tier, for other ranks.
    num_calls: number of the last call of other ranks (`RankedStorage`) before `removed` was known.
    """

    step: int
    swapped: list[SavedBlocks] = msgspec.field(default_factory=list)
    saves: list[SavedBlocks] = msgspec.field(default_factory=list)
    loads: list[PlannedBlock] = msgspec.field(default_factory=list)
    removed: list[tuple[int, bytes]] = msgspec.field(default_factory=list)
    num_calls: int = 0


def plan_blocks(blocks: Sequence[KeyedBlock], block_ids: list[list[int]]) -> list[PlannedBlock]:
    """Blocks of a sequence with the block tables `block_ids`, by group."""
    return [(block.group, block_ids[block.group][block.position], block.keys) for block in blocks]
