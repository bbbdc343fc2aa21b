"""A mirror of a replica's KV blocks, and the views of it for operators and tenants.

Operators see all blocks. Tenants see only their own, numbered by slots of the view instead of block
ids, which would reveal what other tenants have cached; of other blocks they see only the total.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from engine.contract.replica_state import KVMapBlock, KVMapFrame, TenantBlocks


class Cell(msgspec.Struct, frozen=True, gc=False):
    """A KV block. `users`: ids of some requests that use it; `refs` counts all of them."""

    refs: int
    cached: bool
    owner: str
    users: tuple[str, ...] = ()
    adapter: str = ""
    tier: str = ""
    media: str = ""


Cells = dict[int, Cell]


@dataclass(slots=True)
class Mirror:
    """All blocks that were ever used; other blocks are free and empty. `frame`: the latest one."""

    cells: Cells = field(default_factory=dict)
    frame: KVMapFrame | None = None

    def apply_frame(self, frame: KVMapFrame) -> set[int] | None:
        """Apply a frame; return the changed blocks, or None if a frame was missed."""
        cells = cells_of(frame, frame.blocks)
        if frame.whole:
            self.begin(frame, cells)
        elif self.follows(frame):
            self.frame = frame
            self.cells.update(cells)
        else:
            return None
        return set(cells)

    def follows(self, frame: KVMapFrame) -> bool:
        """Return whether a frame directly follows the last one."""
        last = self.frame
        return (
            last is not None
            and last.incarnation == frame.incarnation
            and (last.run, last.number + 1) == (frame.run, frame.number)
        )

    def begin(self, frame: KVMapFrame, cells: Cells) -> None:
        """Restart from a full frame."""
        self.frame, self.cells = frame, cells

    def tenant(self, name: str) -> TenantBlocks | None:
        """Return a tenant's counts in the last frame."""
        tenants = self.frame.tenants if self.frame is not None else []
        return next((tenant for tenant in tenants if tenant.name == name), None)


def cells_of(frame: KVMapFrame, states: Iterable[KVMapBlock]) -> Cells:
    """Return the blocks of a frame by block id."""
    words = frame.words
    return {
        state.block_id: Cell(
            state.refs,
            state.cached,
            words[state.owner],
            tuple([words[user] for user in state.users]),
            words[state.adapter],
            "" if state.tier is None else words[state.tier],
            "" if state.media is None else words[state.media],
        )
        for state in states
    }


VisibleBlocks = dict[str, Any]


class BlockView(Protocol):
    """The blocks as one viewer sees them."""

    def visible_blocks(self, mirror: Mirror) -> list[int]:
        """Return the ids of the blocks that the viewer may see."""

    def full_frame(self, mirror: Mirror, blocks: Iterable[int] | None = None) -> VisibleBlocks:
        """Return a full frame of all visible blocks, or of `blocks` if the rest follows as deltas.

        Raises: ValueError if `mirror` has received no frame yet.
        """

    def delta(self, mirror: Mirror, changed: Iterable[int], evicted: int) -> VisibleBlocks | None:
        """Return the visible changes among `changed` blocks; None if there are none."""


class OperatorBlockView:
    """Shows all blocks."""

    def visible_blocks(self, mirror: Mirror) -> list[int]:
        return list(mirror.cells)

    def full_frame(self, mirror: Mirror, blocks: Iterable[int] | None = None) -> VisibleBlocks:
        return self._frame_json(mirror, mirror.cells if blocks is None else blocks, 0) | {
            "whole": True
        }

    def delta(self, mirror: Mirror, changed: Iterable[int], evicted: int) -> VisibleBlocks | None:
        return self._frame_json(mirror, changed, evicted)

    @staticmethod
    def _frame_json(mirror: Mirror, blocks: Iterable[int], evicted: int) -> VisibleBlocks:
        frame = mirror.frame
        if frame is None:
            raise ValueError("There was no frame yet.")
        frame_json = _cells((block_id, mirror.cells[block_id]) for block_id in blocks)
        return {
            **frame_json,
            "at": frame.at,
            "num_cells": frame.num_blocks,
            "block_size": frame.block_size,
            "num_free": frame.num_free,
            "num_cached": frame.num_cached,
            "evicted": evicted,
            "tenants": [_tenant(tenant) for tenant in frame.tenants],
        }


class TenantBlockView:
    """Shows the blocks of one tenant."""

    def __init__(self, tenant: str) -> None:
        self._tenant = tenant
        self._slots: dict[int, int] = {}
        self._vacant: list[int] = []
        self._last: Any = None

    def visible_blocks(self, mirror: Mirror) -> list[int]:
        """Return only the tenant's blocks, so that frame sizes reveal nothing about others."""
        return sorted(block_id for block_id, cell in mirror.cells.items() if self._owns(cell))

    def full_frame(self, mirror: Mirror, blocks: Iterable[int] | None = None) -> VisibleBlocks:
        self._slots.clear()
        self._vacant.clear()
        frame_json = self._frame_json(
            mirror, self.visible_blocks(mirror) if blocks is None else blocks
        )
        frame_json.pop("gone")
        return {**frame_json, "whole": True, "evicted": 0}

    def delta(self, mirror: Mirror, changed: Iterable[int], evicted: int) -> VisibleBlocks | None:
        """Return changed and removed blocks of the tenant; `evicted` counts only its own."""
        frame_json = self._frame_json(mirror, changed)
        seen = (frame_json["tenants"], frame_json["num_cells"])
        if not frame_json["blocks"] and not frame_json["gone"] and seen == self._last:
            return None
        self._last = seen
        return {**frame_json, "evicted": len(frame_json["gone"])}

    def _frame_json(self, mirror: Mirror, blocks: Iterable[int]) -> VisibleBlocks:
        frame = mirror.frame
        if frame is None:
            raise ValueError("There was no frame yet.")
        visible, gone = [], []
        for block_id in blocks:
            cell = mirror.cells[block_id]
            if self._owns(cell):
                visible.append((self._slot(block_id), cell))
            elif block_id in self._slots:
                slot = self._slots.pop(block_id)
                heapq.heappush(self._vacant, slot)
                gone.append(slot)
        # A slot that was freed and reused in this frame isn't gone.
        used_slots = {slot for slot, _ in visible}
        counts = mirror.tenant(self._tenant)
        return {
            **_cells(visible),
            "gone": [slot for slot in gone if slot not in used_slots],
            "at": frame.at,
            "num_cells": frame.num_blocks,
            "block_size": frame.block_size,
            "tenants": [_without_recent_cache(counts)] if counts is not None else [],
        }

    def _owns(self, cell: Cell) -> bool:
        return cell.owner == self._tenant and bool(cell.refs or cell.cached)

    def _slot(self, block_id: int) -> int:
        """Return the viewer's slot of a block; a new block gets the lowest free slot."""
        slot = self._slots.get(block_id)
        if slot is None:
            slot = heapq.heappop(self._vacant) if self._vacant else len(self._slots)
            self._slots[block_id] = slot
        return slot


def _cells(cells: Iterable[tuple[int, Cell]]) -> VisibleBlocks:
    """Return blocks as [number, refs, cached, owner, users, adapter, tier, media]; the last five
    are indices into `words`.
    """
    words: dict[str, int] = {}
    blocks = [
        [
            number,
            cell.refs,
            int(cell.cached),
            words.setdefault(cell.owner, len(words)),
            [words.setdefault(user, len(words)) for user in cell.users],
            words.setdefault(cell.adapter, len(words)),
            words.setdefault(cell.tier, len(words)),
            words.setdefault(cell.media, len(words)),
        ]
        for number, cell in cells
    ]
    return {"blocks": blocks, "words": list(words)}


def _tenant(blocks: TenantBlocks) -> VisibleBlocks:
    return {name: getattr(blocks, name) for name in blocks.__struct_fields__}


def _without_recent_cache(blocks: TenantBlocks) -> VisibleBlocks:
    """Return a tenant's counts without `free`, which can be counted from its cells."""
    return {name: value for name, value in _tenant(blocks).items() if name != "free"}
