"""`DraftMaker`: whoever computes drafts, which takes time before the step."""

from __future__ import annotations

from typing import Protocol

from engine.scheduler import Sequence
from engine.speculative.following import Following
from engine.speculative.step_costs import StepCosts


class DraftMaker(Protocol):
    """A draft model, or heads on the model's hidden states.

    Attributes:
        costs: of one draft for each of some rows, by how many these are.
        seconds: that the last round took; the drafter sets it back.
        reading: of those, what went into tokens that it was behind by.
        works: whether there may be drafts.
        following: the sequences that it must read along; None: it can read each when it's to draw.
    """

    costs: StepCosts
    following: Following | None
    seconds: float
    reading: float

    @property
    def works(self) -> bool: ...

    def propose(self, wanted: list[tuple[Sequence, int]]) -> dict[int, list[int]]:
        """Drafts by sequence id, at most as many as are wanted for each."""

    def takes(self, sequence: Sequence) -> bool:
        """Whether a sequence may have any."""

    def longest(self, sequence: Sequence) -> int:
        """How many it may have."""

    def to_read(self, sequence: Sequence) -> float:
        """Seconds that it takes to read what it doesn't know of a sequence, about."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence has left."""

    def reset(self, *, worker_too: bool = False) -> None:
        """Forget all sequences; `worker_too`: the batch has gone as well."""

    def check_integrity(self) -> None:
        """Raise RuntimeError unless its books balance."""
