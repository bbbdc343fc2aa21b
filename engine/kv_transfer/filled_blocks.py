"""`FilledBlocks`: which blocks of running sequences a step fills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.kv_cache import KVCacheConfig
from engine.kv_transfer.base import PlanView, RequestView
from engine.kv_transfer.block_keys import BlockKeys
from engine.kv_transfer.offloading_metadata import PlannedBlock, SavedBlocks, plan_blocks


@dataclass(slots=True)
class _Tracked:
    """A running sequence: its block ids by group, its computed tokens before the next step, and the
    number of its first blocks that are saved.
    """

    block_ids: list[list[int]]
    num_computed: int
    num_saved: int = 0


class FilledBlocks:
    """Follows the block tables of running sequences from plan to plan."""

    def __init__(self, layout: KVCacheConfig, block_size: int) -> None:
        self._layout, self._block_size = layout, block_size
        self._tracked: dict[int, _Tracked] = {}

    def apply(self, plan: PlanView) -> None:
        """Take over a plan's changes of block tables."""
        for seq_id in plan.removed:
            self._tracked.pop(seq_id, None)
        for new in plan.new:
            self._tracked[new.seq_id] = _Tracked(
                [list(table) for table in new.block_ids], new.num_computed_tokens
            )
        for seq_id, block_ids in plan.new_blocks:
            for table, new_ids in zip(self._tracked[seq_id].block_ids, block_ids, strict=True):
                table += new_ids

    def in_step(
        self, plan: PlanView, scheduled: Sequence[RequestView], keys: BlockKeys
    ) -> list[SavedBlocks]:
        """The blocks that a step fills, and the states that it saves."""
        saves: list[SavedBlocks] = []
        size = self._block_size
        checkpoints: dict[int, list[tuple[int, int]]] = {}
        for seq_id, num_tokens, block_id in plan.checkpoints:
            checkpoints.setdefault(seq_id, []).append((num_tokens, block_id))
        encoded = {task.seq_id for task in plan.encode}
        for sequence in scheduled:
            tracked, token_ids = self._tracked[sequence.seq_id], sequence.token_ids
            end = min(sequence.num_computed_tokens, len(token_ids)) // size
            states = checkpoints.get(sequence.seq_id, ())
            if end <= tracked.num_saved and not states and sequence.seq_id not in encoded:
                tracked.num_computed = sequence.num_computed_tokens
                continue
            hashes = sequence.block_hashes.hash_full_blocks(token_ids, size)
            blocks: list[PlannedBlock] = [
                (index, table[position], keys.of_block(index, hashes[position]))
                for position in range(tracked.num_saved, end)
                for index, (group, table) in enumerate(
                    zip(self._layout.groups, tracked.block_ids, strict=True)
                )
                # A block that left a window before the step may belong to another sequence now.
                if group.kind in ("full", "window")
                and position >= group.first_needed_block(tracked.num_computed, size)
            ]
            state_group = len(self._layout.groups) - 1
            blocks += [
                (state_group, block_id, keys.of_block(state_group, hashes[num_tokens // size - 1]))
                for num_tokens, block_id in states
                # Drafts and tokens that are still being sampled aren't known yet.
                if num_tokens % size == 0 and num_tokens <= len(token_ids)
            ]
            if sequence.seq_id in encoded:
                encoder_blocks = keys.encoder_blocks(sequence)
                blocks += plan_blocks(encoder_blocks, tracked.block_ids)
            tracked.num_saved = max(tracked.num_saved, end)
            tracked.num_computed = sequence.num_computed_tokens
            if blocks:
                saves.append((sequence.tenant, sequence.cache_namespace, blocks))
        return saves
