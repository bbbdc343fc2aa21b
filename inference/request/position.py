"""Where a client is in its stream, as the id of the last event that it has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.contract.errors import InvalidRequest

#: Streams of more outputs have no ids: each id counts the tokens of all.
MAX_OUTPUTS = 64

_ID = re.compile(
    r"(?P<stream>[a-z]+-[0-9a-f]{32}):(?P<events>\d{1,9}):"
    r"(?:(?P<phase>[be])(?P<done>\d{1,9})|(?P<counts>\d{1,9}\.?(?:,\d{1,9}\.?)*)"
    r"(?::(?P<output>\d{1,3})\.(?P<start>\d{1,9})\.(?P<part>\d{1,3}))?)",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """Behind an event of a stream.

    Attributes:
        stream: the request's id. events: how many the client has, this one included.
        stage: "b" before the first token, "e" behind the last, "" between.
        done: in these phases, events of the phase that the client has.
        counts: tokens of each output that are told. finished: whether its end is, too.
        output, start, part: the latest tokens of this output began behind `start` ones and make
            several events, `part` of which the client has; `part` 0: it has them all.
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
        """Raises `InvalidRequest` for what is no id of ours."""
        found = _ID.fullmatch(event_id) if len(event_id) < 2000 else None
        if found is None:
            raise InvalidRequest(
                "Last-Event-ID must be the id of an event of a stream.", param="Last-Event-ID"
            )
        counts = found["counts"].split(",") if found["counts"] else []
        return cls(
            stream=found["stream"],
            events=int(found["events"]),
            stage=found["phase"] or "",
            done=int(found["done"] or 0),
            counts=[int(count.rstrip(".")) for count in counts],
            finished=[count.endswith(".") for count in counts],
            output=int(found["output"] or 0),
            start=int(found["start"] or 0),
            part=int(found["part"] or 0),
        )
