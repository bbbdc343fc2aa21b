"""A worker and a KV cache that know what each slot must hold: the oracle of scheduler and pool."""

from __future__ import annotations

from collections.abc import Sequence as List

from engine.scheduler import Sequence, StepPlan

#: What a slot holds: the KV cache group, and a hash of everything up to its token.
Content = tuple[int, int]


class PagedMemory:
    """Follows plans as a worker does, from the plans alone.

    Every token of a step is written to its slot, then every token that a layer of a group would
    read is looked up. A stale, foreign or missing entry is an AssertionError, as is a slot that two
    tokens are written to, and a plan that names a sequence which the worker doesn't hold.
    """

    def __init__(self, windows: tuple[int, ...], block_size: int) -> None:
        self._windows, self._size = windows, block_size
        self._slots: dict[int, Content] = {}
        self._tables: dict[int, list[list[int]]] = {}
        self._computed: dict[int, int] = {}

    def run(self, plan: StepPlan, scheduled: List[Sequence], *, fails: bool = False) -> None:
        """One step; one that fails has written nothing."""
        self._apply(plan)
        work = list(zip(scheduled, plan.num_scheduled, strict=True))
        assert [sequence.seq_id for sequence, _ in work] == plan.seq_ids
        assert len(set(plan.seq_ids)) == len(plan.seq_ids)
        written: set[int] = set()
        ends = {}
        for sequence, count in work:
            start = self._computed[sequence.seq_id]
            ends[sequence.seq_id] = self._computed[sequence.seq_id] = start + count
            assert fails or 0 < start + count <= sequence.num_tokens
            if not fails:
                self._write(sequence, start, start + count, written)
        if not fails:
            for sequence, count in work:
                self._read(sequence, ends[sequence.seq_id] - count, ends[sequence.seq_id])

    def _apply(self, plan: StepPlan) -> None:
        for seq_id in plan.removed:
            self._tables.pop(seq_id, None)
        for new in plan.new:
            assert new.seq_id not in self._tables
            self._tables[new.seq_id] = [list(ids) for ids in new.block_ids]
            self._computed[new.seq_id] = new.num_computed_tokens
        for seq_id, recent in plan.new_blocks:
            for table, ids in zip(self._tables[seq_id], recent, strict=True):
                table.extend(ids)

    def _write(self, sequence: Sequence, start: int, end: int, written: set[int]) -> None:
        for group, table in enumerate(self._tables[sequence.seq_id]):
            contents = _contents(sequence, group)
            for position in range(start, end):
                slot = self._slot(table, position)
                assert slot not in written, "two tokens of a step share a slot"
                written.add(slot)
                self._slots[slot] = contents[position]

    def _read(self, sequence: Sequence, start: int, end: int) -> None:
        for group, table in enumerate(self._tables[sequence.seq_id]):
            window, contents = self._windows[group], _contents(sequence, group)
            for position in range(max(0, start - window + 1) if window else 0, end):
                content = self._slots.get(self._slot(table, position))
                assert content == contents[position], f"{sequence.seq_id} reads what isn't its own"

    def _slot(self, table: list[int], position: int) -> int:
        return table[position // self._size] * self._size + position % self._size


def _contents(sequence: Sequence, group: int) -> list[Content]:
    """What each position of a sequence holds in a group."""
    hashes = sequence.block_hashes
    content_hash, content = hash((hashes.scope, group)), dict(hashes.content)
    contents = []
    for position, token in enumerate(sequence.token_ids):
        content_hash = hash((content_hash, token, content.get(position)))
        contents.append((group, content_hash))
    return contents
