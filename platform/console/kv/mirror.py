"""A replica's blocks as its frames tell them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from engine.contract.block_map import BlockFrame, BlockState, TenantBlocks


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
    frame: BlockFrame | None = None

    def take(self, frame: BlockFrame) -> set[int] | None:
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

    def follows(self, frame: BlockFrame) -> bool:
        """Whether a frame goes on from the last one."""
        last = self.frame
        return (
            last is not None
            and last.incarnation == frame.incarnation
            and (last.run, last.number + 1) == (frame.run, frame.number)
        )

    def begin(self, frame: BlockFrame, cells: Cells) -> None:
        """Anew, with all that a whole frame tells."""
        self.frame, self.cells = frame, cells

    def tenant(self, name: str) -> TenantBlocks | None:
        """What the last frame says of a tenant."""
        found = self.frame.tenants if self.frame is not None else []
        return next((each for each in found if each.name == name), None)


def cells_of(frame: BlockFrame, states: Iterable[BlockState]) -> Cells:
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
