"""What is known of a request beside its usage: its ids, its way through gateway and engine."""

from __future__ import annotations

from typing import Any

import msgspec

from metering.records import plain_text

#: Of one request: outputs, hops and points in time that are kept.
MOST_OUTPUTS, MOST_HOPS, MOST_POINTS = 8, 20, 64
#: Characters of a refusal's reason.
MOST_REASON = 500


class OutputNote(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One output's way through the engine; see `engine.contract.protocol.FlightRecord`.

    Times are milliseconds; `chunks` and `preempted_at` count from the request's arrival at the
    replica. `chunks`: [when, tokens]. `drafted`: tokens of a step with drafts, on average.
    """

    number: int = 0
    index: int = 0
    tokens: int = 0
    reason: str = ""
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    num_chunks: int = 0
    chunks: list[tuple[int, int]] = msgspec.field(default_factory=list)
    cached: int = 0
    cold: str = ""
    preemptions: int = 0
    preempted_at: list[int] = msgspec.field(default_factory=list)
    steps: int = 0
    drafts: int = 0
    accepted: int = 0
    drafted: float = 0.0
    ahead: int = 0
    ahead_own: int = 0
    behind: list[str] = msgspec.field(default_factory=list)


class Hop(msgspec.Struct, omit_defaults=True, kw_only=True):
    """It was given to a replica, or taken away from it for a reason. `at_ms`: since it came."""

    at_ms: float
    replica: str
    reason: str = ""


class RequestNote(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What is kept of a request beside `UsageRecord`.

    Attributes:
        header_id: its `x-request-id`, the client's own or ours. answer_id: what the answer is
            called, where that's another id than the ledger's.
        code, message: what it was refused or failed with.
        replica: that had it last. rates: picos a token of prompt, cached and output.
        limits: what the limits had left when it was let in.
        tokens: [milliseconds since it came, output tokens so far], over all outputs.
        asked: of its sampling what is no default.
    """

    header_id: str = ""
    answer_id: str = ""
    code: str = ""
    message: str = ""
    replica: str = ""
    numerics_changed: bool = False
    rates: tuple[int, int, int] = (0, 0, 0)
    limits: dict[str, int] = msgspec.field(default_factory=dict)
    asked: dict[str, Any] = msgspec.field(default_factory=dict)
    admitted_ms: float = 0.0
    hops: list[Hop] = msgspec.field(default_factory=list)
    outputs: list[OutputNote] = msgspec.field(default_factory=list)
    tokens: list[tuple[int, int]] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        self.header_id = plain_text(self.header_id, 200)
        self.answer_id = plain_text(self.answer_id, 200)
        self.message = plain_text(self.message, MOST_REASON)

    @property
    def first(self) -> OutputNote:
        """The first output's way."""
        return self.outputs[0] if self.outputs else OutputNote()


_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(RequestNote)


def note_text(note: RequestNote) -> str:
    """As the database keeps it."""
    return _encode(note).decode()


def read_note(text: str) -> RequestNote:
    """What `note_text` made; an empty one of what was kept without a note."""
    return _decoder.decode(text) if text else RequestNote()
