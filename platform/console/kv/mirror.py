"""A replica's blocks as its frames tell them."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.contract.block_map import BlockFrame, TenantBlocks


@dataclass(frozen=True, slots=True)
class Cell:
    """One block. `users`: ids of requests that use it, or some of them; `refs` counts all."""

    refs: int
    cached: bool
    owner: str
    users: tuple[str, ...] = ()
    adapter: str = ""


@dataclass(slots=True)
class Mirror:
    """All blocks that were ever used; the others are free and empty.

    Attributes:
        frame: the last one.
    """

    cells: dict[int, Cell] = field(default_factory=dict)
    frame: BlockFrame | None = None

    def take(self, frame: BlockFrame) -> set[int] | None:
        """The blocks that changed; None when the frame doesn't follow: a whole one is needed."""
        last = self.frame
        if not frame.whole:
            follows = (
                last is not None
                and last.incarnation == frame.incarnation
                and (last.run, last.number + 1) == (frame.run, frame.number)
            )
            if not follows:
                return None
        else:
            self.cells.clear()
        self.frame = frame
        words = frame.words
        for state in frame.blocks:
            self.cells[state.block_id] = Cell(
                state.refs,
                state.cached,
                words[state.owner],
                tuple(words[user] for user in state.users),
                words[state.adapter],
            )
        return {state.block_id for state in frame.blocks}

    def tenant(self, name: str) -> TenantBlocks | None:
        """What the last frame says of a tenant."""
        found = self.frame.tenants if self.frame is not None else []
        return next((each for each in found if each.name == name), None)
