"""What a `Planner` chooses from, and for which step."""

from __future__ import annotations

from typing import NamedTuple


class Step(NamedTuple):
    """A step that may get drafts: its rows that decode, the most drafts, prompts' tokens, and the
    seconds that it takes the host to give it drafts of a model.
    """

    width: int
    most: int
    beside: int
    planning: float = 0.0


class Offer(NamedTuple):
    """Drafts of a sequence: how likely the first, the first two ... hold; whose it is, and the
    seconds that go into reading it first, which so many tokens are to pay; and the tokens that its
    own drafts brought.
    """

    chances: list[float]
    seq_id: int
    tenant: str
    reading: float = 0.0
    gaining: int = 1
    own: float = 0.0
