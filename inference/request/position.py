"""A client's position in a stream, encoded in the id of the last event that it received."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.contract.errors import InvalidRequest

#: Streams of more outputs have no event ids: each id counts the tokens of every output.
MAX_OUTPUTS = 64

_ID = re.compile(
    r"(?P<stream>[a-z]+-[0-9a-f]{32}):(?P<events>\d{1,9}):"
    r"(?:(?P<phase>[be])(?P<done>\d{1,9})|(?P<counts>\d{1,9}\.?(?:,\d{1,9}\.?)*)"
    r"(?::(?P<output>\d{1,3})\.(?P<start>\d{1,9})\.(?P<part>\d{1,3}))?)",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """The position after an event.

    Attributes:
        stream: the request's id. events: number of received events.
        stage: "b" before the first token, "e" after the last, "" between.
        done: number of received events of stage "b" or "e".
        counts: received tokens of each output. finished: whether its end was received.
        output, start, part: the last tokens of `output`, from `start` on, were written as several
            events, of which `part` were received; 0: all of them.
    """

    stream: str
    events: int
    stage: str = ""
    done: int = 0
    counts: Sequence[int] = ()
    finished: Sequence[bool] = field(default=())
    output: int = 0
    start: int = 0
    part: int = 0

    @classmethod
    def parse(cls, event_id: str) -> StreamPosition:
        """Raises `InvalidRequest` for anything but an event id of this API."""
        match = _ID.fullmatch(event_id) if len(event_id) < 2000 else None
        if match is None:
            raise InvalidRequest(
                "Last-Event-ID must be the id of an event of a stream.", param="Last-Event-ID"
            )
        counts = match["counts"].split(",") if match["counts"] else []
        return cls(
            stream=match["stream"],
            events=int(match["events"]),
            stage=match["phase"] or "",
            done=int(match["done"] or 0),
            counts=[int(count.rstrip(".")) for count in counts],
            finished=[count.endswith(".") for count in counts],
            output=int(match["output"] or 0),
            start=int(match["start"] or 0),
            part=int(match["part"] or 0),
        )
