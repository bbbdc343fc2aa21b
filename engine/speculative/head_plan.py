"""What the core asks of heads on the model's hidden states."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """What the core knows of them.

    Attributes:
        most: drafts of a sequence.
        max_model_len: longer sequences get no drafts; 0: any do.
        reads_tokens: each draft comes from all tokens, so they are to be followed, and vectors in
            their place are in the way.
        part: of the time of a prompt, what its states take that nobody but heads asks for.
    """

    most: int
    max_model_len: int = 0
    reads_tokens: bool = False
    part: float = 0.0


class HeadPlan(msgspec.Struct):
    """Drafts that are wanted: at most `counts[i]`, >= 1, of the sequence `seq_ids[i]`."""

    seq_ids: list[int]
    counts: list[int]


class HeadResult(msgspec.Struct):
    """What heads drew.

    Attributes:
        drafts: by sequence, in the order of `HeadPlan.seq_ids`; none where nothing is known of it.
        lost: sequences of which nothing will be known any more.
        reading: seconds that went into tokens that they hadn't read yet.
    """

    drafts: list[list[int]]
    lost: list[int] = msgspec.field(default_factory=list)
    reading: float = 0.0
