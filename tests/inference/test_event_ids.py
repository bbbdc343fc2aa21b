"""`Last-Event-ID` is a client's: whatever it says, it's refused or read, no token goes twice."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.errors import InvalidRequest
from inference.engine_client.journal import OpenStream
from inference.engine_client.mailbox import TokenChunk
from inference.generation.takeover import StreamNotFound, TakenOverStream
from inference.request.position import StreamPosition

STREAM = "chatcmpl-" + "0a" * 16
NUMBER = st.integers(0, 12).map(str) | st.sampled_from(["999999999", "٣", "-1", "", "1" * 30])
COUNTS = st.lists(st.tuples(NUMBER, st.sampled_from(["", "."])).map("".join), max_size=5)
MIDDLE = COUNTS.map(",".join) | st.tuples(st.sampled_from("bex"), NUMBER).map("".join)
PART = st.just("") | st.tuples(NUMBER, NUMBER, NUMBER).map(lambda found: ":" + ".".join(found))
IDS = st.tuples(st.sampled_from([STREAM, STREAM + "0", "x", ""]), NUMBER, MIDDLE, PART).map(
    lambda found: f"{found[0]}:{found[1]}:{found[2]}{found[3]}"
)
OUTPUTS = st.lists(st.tuples(st.integers(0, 8), st.sampled_from([None, "stop"])), min_size=1)


def taken(position: StreamPosition, outputs: list[tuple[int, str | None]]) -> TakenOverStream:
    """One prompt with so many outputs, of each the tokens 0, 1, 2 ... and perhaps its end."""
    about = OpenStream(
        tenant_id=1, holder="key 1", print=b"", gateway="g", outbox="o", requests=["r"],
        started_at=0.0, seed=1,
    )  # fmt: skip
    known = [
        TokenChunk(0, index, list(range(count)), finish_reason=reason)
        for index, (count, reason) in enumerate(outputs)
    ]
    return TakenOverStream(position, about, [known], [(None, False)], 1, STREAM)


@settings(max_examples=150, deadline=None)
@given(event_id=IDS | st.text(max_size=60), outputs=OUTPUTS)
def test_fault_49_any_id_is_refused_or_gone_on_with(
    event_id: str, outputs: list[tuple[int, str | None]]
) -> None:
    try:
        position = StreamPosition.parse(event_id)
    except InvalidRequest:
        return
    found = taken(position, outputs)
    try:
        found.check()
    except StreamNotFound:
        return
    pieces = [*found.delivered(), *found.partially_delivered(), *found.undelivered()]
    assert found.num_tokens == sum(count for count, _ in outputs)
    for index, (count, _) in enumerate(outputs):
        mine = [piece for piece in pieces if piece.index == index]
        tokens = [token for piece in mine for token in piece.token_ids]
        # None is left out but of an output of which the client says that it had ended.
        whole = tokens == list(range(count))
        assert whole or (found.is_finished(0, index) and tokens == list(range(len(tokens))))
        assert sum(piece.finish_reason is not None for piece in mine) <= 1


def test_ids_of_every_form_are_read() -> None:
    """Or the test above would see refusals alone."""
    forms = ["4:b2", "4:e0", "4:3", "4:3.", "4:3,0.,7", "4:3,0.,7:2.5.1"]
    found = [StreamPosition.parse(f"{STREAM}:{form}") for form in forms]
    assert [one.stage for one in found] == ["b", "e", "", "", "", ""]
    assert (list(found[5].counts), list(found[5].finished)) == ([3, 0, 7], [False, True, False])
    assert (found[5].output, found[5].start, found[5].part) == (2, 5, 1)


@pytest.mark.parametrize("form", ["4:b2:0.0.1", "4:e1:0.3.2", "4:3:0.1.1:0.1.1", "4:٣", "4:3\n"])
def test_what_no_gateway_writes_is_refused(form: str) -> None:
    """In a phase without tokens no tokens were told in part."""
    with pytest.raises(InvalidRequest, match=re.escape("Last-Event-ID")):
        StreamPosition.parse(f"{STREAM}:{form}")


def test_a_part_that_begins_behind_what_was_told_is_gone() -> None:
    position = StreamPosition.parse(f"{STREAM}:4:3:0.4.1")
    with pytest.raises(StreamNotFound):
        taken(position, [(5, None)]).check()
