"""What of a replica's blocks a viewer sees.

An operator sees them all. A tenant sees its own, under numbers of their own: where a block lies in
the pool follows from what others have cached, and so would tell of it. Of everything else it sees
how much there is, and nothing of what that holds or whether it's in use.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from engine.contract.replica_state import KVMapBlock, KVMapFrame, TenantBlocks

# -- A replica's blocks as its frames tell them.


class Cell(msgspec.Struct, frozen=True, gc=False):
    """One block. `users`: ids of requests that use it, or some of them; `refs` counts all."""

    refs: int
    cached: bool
    owner: str
    users: tuple[str, ...] = ()
    adapter: str = ""


Cells = dict[int, Cell]


@dataclass(slots=True)
class Mirror:
    """All blocks that were ever used; the others are free and empty.

    Attributes:
        frame: the last one.
    """

    cells: Cells = field(default_factory=dict)
    frame: KVMapFrame | None = None

    def apply_frame(self, frame: KVMapFrame) -> set[int] | None:
        """The blocks that changed; None when the frame doesn't follow: a whole one is needed."""
        told = cells_of(frame, frame.blocks)
        if frame.whole:
            self.begin(frame, told)
        elif self.follows(frame):
            self.frame = frame
            self.cells.update(told)
        else:
            return None
        return set(told)

    def follows(self, frame: KVMapFrame) -> bool:
        """Whether a frame goes on from the last one."""
        last = self.frame
        return (
            last is not None
            and last.incarnation == frame.incarnation
            and (last.run, last.number + 1) == (frame.run, frame.number)
        )

    def begin(self, frame: KVMapFrame, cells: Cells) -> None:
        """Anew, with all that a whole frame tells."""
        self.frame, self.cells = frame, cells

    def tenant(self, name: str) -> TenantBlocks | None:
        """What the last frame says of a tenant."""
        found = self.frame.tenants if self.frame is not None else []
        return next((each for each in found if each.name == name), None)


def cells_of(frame: KVMapFrame, states: Iterable[KVMapBlock]) -> Cells:
    """Some of a frame's blocks, by their numbers."""
    words = frame.words
    return {
        state.block_id: Cell(
            state.refs,
            state.cached,
            words[state.owner],
            tuple([words[user] for user in state.users]),
            words[state.adapter],
        )
        for state in states
    }


VisibleBlocks = dict[str, Any]


class BlockView(Protocol):
    """One viewer's."""

    def visible_blocks(self, mirror: Mirror) -> list[int]:
        """The blocks that the viewer may see."""

    def full_frame(self, mirror: Mirror, blocks: Iterable[int] | None = None) -> VisibleBlocks:
        """All that the viewer may see, or so many of `seen`: a page begins anew with it, and gets
        the others as what changed. `mirror` has had a frame.
        """

    def delta(self, mirror: Mirror, changed: Iterable[int], evicted: int) -> VisibleBlocks | None:
        """What is new in it; None when nothing is."""


class OperatorBlockView:
    """Everything."""

    def visible_blocks(self, mirror: Mirror) -> list[int]:
        """All blocks."""
        return list(mirror.cells)

    def full_frame(self, mirror: Mirror, blocks: Iterable[int] | None = None) -> VisibleBlocks:
        """All blocks, or these."""
        return self._frame_json(mirror, mirror.cells if blocks is None else blocks, 0) | {
            "whole": True
        }

    def delta(self, mirror: Mirror, changed: Iterable[int], evicted: int) -> VisibleBlocks | None:
        """Those that changed, and how the tenants stand."""
        return self._frame_json(mirror, changed, evicted)

    @staticmethod
    def _frame_json(mirror: Mirror, blocks: Iterable[int], evicted: int) -> VisibleBlocks:
        frame = mirror.frame
        if frame is None:
            raise ValueError("There was no frame yet.")
        told = _cells((block_id, mirror.cells[block_id]) for block_id in blocks)
        return {
            **told,
            "at": frame.at,
            "num_cells": frame.num_blocks,
            "block_size": frame.block_size,
            "num_free": frame.num_free,
            "num_cached": frame.num_cached,
            "evicted": evicted,
            "tenants": [_tenant(each) for each in frame.tenants],
        }


class TenantBlockView:
    """A tenant's own blocks."""

    def __init__(self, tenant: str) -> None:
        self._tenant = tenant
        self._slots: dict[int, int] = {}
        self._vacant: list[int] = []
        self._last: Any = None

    def visible_blocks(self, mirror: Mirror) -> list[int]:
        """Its own: how others' lie between them doesn't show in how many are told at a time."""
        return sorted(block_id for block_id, cell in mirror.cells.items() if self._owns(cell))

    def full_frame(self, mirror: Mirror, blocks: Iterable[int] | None = None) -> VisibleBlocks:
        """All of its blocks, or these."""
        self._slots.clear()
        self._vacant.clear()
        told = self._frame_json(mirror, self.visible_blocks(mirror) if blocks is None else blocks)
        told.pop("gone")
        return {**told, "whole": True, "evicted": 0}

    def delta(self, mirror: Mirror, changed: Iterable[int], evicted: int) -> VisibleBlocks | None:
        """Those of its own that changed or went. Evictions of others' don't count."""
        told = self._frame_json(mirror, changed)
        seen = (told["tenants"], told["num_cells"])
        if not told["blocks"] and not told["gone"] and seen == self._last:
            return None
        self._last = seen
        return {**told, "evicted": len(told["gone"])}

    def _frame_json(self, mirror: Mirror, blocks: Iterable[int]) -> VisibleBlocks:
        frame = mirror.frame
        if frame is None:
            raise ValueError("There was no frame yet.")
        mine, gone = [], []
        for block_id in blocks:
            cell = mirror.cells[block_id]
            if self._owns(cell):
                mine.append((self._slot(block_id), cell))
            elif block_id in self._slots:
                slot = self._slots.pop(block_id)
                heapq.heappush(self._vacant, slot)
                gone.append(slot)
        # A slot that was given up and taken again in this frame isn't gone.
        taken = {slot for slot, _ in mine}
        own = mirror.tenant(self._tenant)
        return {
            **_cells(mine),
            "gone": [slot for slot in gone if slot not in taken],
            "at": frame.at,
            "num_cells": frame.num_blocks,
            "block_size": frame.block_size,
            "tenants": [_without_recent_cache(own)] if own is not None else [],
        }

    def _owns(self, cell: Cell) -> bool:
        return cell.owner == self._tenant and bool(cell.refs or cell.cached)

    def _slot(self, block_id: int) -> int:
        """The number that the viewer knows the block by: the lowest that is free."""
        slot = self._slots.get(block_id)
        if slot is None:
            slot = heapq.heappop(self._vacant) if self._vacant else len(self._slots)
            self._slots[block_id] = slot
        return slot


def _cells(cells: Iterable[tuple[int, Cell]]) -> VisibleBlocks:
    """Blocks as [number, refs, cached, owner, users, adapter], the last three places in `words`."""
    words: dict[str, int] = {}
    blocks = [
        [
            number,
            cell.refs,
            int(cell.cached),
            words.setdefault(cell.owner, len(words)),
            [words.setdefault(user, len(words)) for user in cell.users],
            words.setdefault(cell.adapter, len(words)),
        ]
        for number, cell in cells
    ]
    return {"blocks": blocks, "words": list(words)}


def _tenant(blocks: TenantBlocks) -> VisibleBlocks:
    return {name: getattr(blocks, name) for name in blocks.__struct_fields__}


def _without_recent_cache(blocks: TenantBlocks) -> VisibleBlocks:
    """Without what it keeps cached of late: its cells show that."""
    return {name: value for name, value in _tenant(blocks).items() if name != "free"}
