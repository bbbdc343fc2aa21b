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
PART = st.just("") | st.tuples(NUMBER, NUMBER, NUMBER).map(
    lambda position: ":" + ".".join(position)
)
IDS = st.tuples(st.sampled_from([STREAM, STREAM + "0", "x", ""]), NUMBER, MIDDLE, PART).map(
    lambda position: f"{position[0]}:{position[1]}:{position[2]}{position[3]}"
)
OUTPUTS = st.lists(st.tuples(st.integers(0, 8), st.sampled_from([None, "stop"])), min_size=1)


def taken_over_stream(
    position: StreamPosition, outputs: list[tuple[int, str | None]]
) -> TakenOverStream:
    """One prompt with so many outputs, of each the tokens 0, 1, 2 ... and perhaps its end."""
    about = OpenStream(
        tenant_id=1, holder="key 1", print=b"", gateway="g", outbox="o", requests=["r"],
        started_at=0.0, seed=1,
    )  # fmt: skip
    earlier_chunks = [
        TokenChunk(0, index, list(range(count)), finish_reason=reason)
        for index, (count, reason) in enumerate(outputs)
    ]
    return TakenOverStream(position, about, [earlier_chunks], [(None, False)], 1, STREAM)


@settings(max_examples=150, deadline=None)
@given(event_id=IDS | st.text(max_size=60), outputs=OUTPUTS)
def test_fault_49_any_id_is_refused_or_gone_on_with(
    event_id: str, outputs: list[tuple[int, str | None]]
) -> None:
    try:
        position = StreamPosition.parse(event_id)
    except InvalidRequest:
        return
    sequence = taken_over_stream(position, outputs)
    try:
        sequence.check()
    except StreamNotFound:
        return
    chunks = [*sequence.delivered(), *sequence.partially_delivered(), *sequence.undelivered()]
    assert sequence.num_tokens == sum(count for count, _ in outputs)
    for index, (count, _) in enumerate(outputs):
        mine = [chunk for chunk in chunks if chunk.index == index]
        tokens = [token for chunk in mine for token in chunk.token_ids]
        # None is left out but of an output of which the client says that it had ended.
        full = tokens == list(range(count))
        assert full or (sequence.is_finished(0, index) and tokens == list(range(len(tokens))))
        assert sum(chunk.finish_reason is not None for chunk in mine) <= 1


def test_ids_of_every_form_are_read() -> None:
    """Or the test above would see refusals alone."""
    forms = ["4:b2", "4:e0", "4:3", "4:3.", "4:3,0.,7", "4:3,0.,7:2.5.1"]
    positions = [StreamPosition.parse(f"{STREAM}:{form}") for form in forms]
    assert [one.stage for one in positions] == ["b", "e", "", "", "", ""]
    assert (list(positions[5].counts), list(positions[5].finished)) == (
        [3, 0, 7],
        [False, True, False],
    )
    assert (positions[5].output, positions[5].start, positions[5].part) == (2, 5, 1)


@pytest.mark.parametrize("form", ["4:b2:0.0.1", "4:e1:0.3.2", "4:3:0.1.1:0.1.1", "4:٣", "4:3\n"])
def test_what_no_gateway_writes_is_refused(form: str) -> None:
    """In a phase without tokens no tokens were told in part."""
    with pytest.raises(InvalidRequest, match=re.escape("Last-Event-ID")):
        StreamPosition.parse(f"{STREAM}:{form}")


def test_a_part_that_begins_behind_what_was_told_is_gone() -> None:
    position = StreamPosition.parse(f"{STREAM}:4:3:0.4.1")
    with pytest.raises(StreamNotFound):
        taken_over_stream(position, [(5, None)]).check()
