"""Bytes that are no message, or nearly one, are refused as such or read whole: nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from engine.contract import messages as protocol
from engine.contract.lora import AdapterRef, AdapterStatus
from engine.contract.messages import (
    AbortRequest,
    ControlReply,
    ControlRequest,
    EngineRequest,
    EngineStats,
    ErrorInfo,
    FlightRecord,
    FollowPrefill,
    ModelInfo,
    OutboxBatch,
    ReplicaEvent,
    TokenDelta,
    TokenLogprobs,
)
from engine.contract.replica_state import Heartbeat
from engine.contract.sampling_params import SamplingParams

LOGPROBS = TokenLogprobs([5, 6], [-0.5, -1.5], [1, 2])
DELTA = TokenDelta(
    request_id="r", index=1, token_ids=[5, 70000], start=3, logprobs=[LOGPROBS, LOGPROBS],
    prompt_logprobs=[None, LOGPROBS], finish_reason="error", stop_reason="x", pooled=b"\0\1",
    error=ErrorInfo(message="m", param="p"), flight=FlightRecord(chunks=[(1, 2)], behind=["q"]),
)  # fmt: skip
REQUEST = EngineRequest(
    request_id="r", gateway_id="g", prompt_token_ids=[1, 2, 70000],
    sampling=SamplingParams(temperature=0.5, logit_bias={5: 1.0}, stop=["x"], seed=7),
    adapter=AdapterRef(name="a", digest="d" * 64, path="/a"),
    resume_token_ids=[[1], []], skip_indices=[1], token_cap=9, trace_headers={"traceparent": "0"},
)  # fmt: skip
HEARTBEAT = Heartbeat(
    replica_id="a", incarnation="b", state="ready", at=1.5, progress_at=1.5, pid=3,
    model=ModelInfo(
        name="m", path="/m", max_model_len=9, vocab_size=9, dtype="float32", eos_token_ids=[2],
        default_sampling={"temperature": 0.5, "stop": ["x"]},
    ),
    stats=EngineStats(prefix_cold_total={"evicted": 3}), adapters=[AdapterStatus(digest="d" * 64)],
)  # fmt: skip
Decode = Callable[[bytes], Any]
MESSAGES: list[tuple[Decode, msgspec.Struct]] = [
    (protocol.decode_inbox, REQUEST),
    (protocol.decode_inbox, AbortRequest(request_id="r", index=2)),
    (protocol.decode_inbox, ControlRequest(command="wake_up", tags=["weights"])),
    (
        protocol.decode_outbox,
        OutboxBatch(
            replica_id="a", incarnation="b", step=4, deltas=[DELTA, DELTA],
            replies=[ControlReply(control_id="c", ok=True)],
        ),
    ),
    (protocol.decode_heartbeat, HEARTBEAT),
    (protocol.decode_replica_event, ReplicaEvent(replica_id="a", incarnation="b", alive=True)),
    (protocol.decode_inbox, FollowPrefill(request=REQUEST)),
]  # fmt: skip
TURNS = 1500


def spoiled(full: bytes, rng: random.Random) -> bytes:
    """Cut, lengthened, with bytes changed, or with a piece of itself in another place."""
    data, way = bytearray(full), rng.randrange(4)
    if way == 0:
        del data[rng.randrange(len(data)) :]
    elif way == 1:
        data += rng.randbytes(rng.randint(1, 8))
    elif way == 2:
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    else:
        start, to = rng.randrange(len(data)), rng.randrange(len(data))
        data[to:to] = data[start : start + rng.randint(1, 30)]
    return bytes(data)


def read(decode: Decode, data: bytes) -> Any:
    """The message, or None for what is refused as the readers of Redis expect it."""
    try:
        return decode(data)
    except msgspec.DecodeError:  # ValidationError is one
        return None


@pytest.mark.parametrize(
    ("decode", "message"), MESSAGES, ids=[type(message).__name__ for _, message in MESSAGES]
)
def test_bytes_changed_anywhere_are_refused_or_read_whole(
    decode: Decode, message: msgspec.Struct
) -> None:
    full_token_ids = protocol.encode(message)
    assert decode(full_token_ids) == message
    rng, refused = random.Random(3), 0
    for _ in range(TURNS):
        decoded = read(decode, spoiled(full_token_ids, rng))
        if decoded is None:
            refused += 1
        else:  # all of its fields are of their types: it can be sent on
            again = decode(protocol.encode(decoded))
            assert protocol.encode(again) == protocol.encode(decoded)
    assert TURNS * 0.3 < refused < TURNS


def test_what_nests_without_an_end_is_refused() -> None:
    """A field that nobody knows is skipped, however deep it is."""
    deep = []
    for decode, message in (MESSAGES[1], MESSAGES[3], MESSAGES[5]):
        full = bytearray(protocol.encode(message))
        assert full[0] >> 4 == 0b1000  # a map of up to fifteen fields
        full[0] += 1
        assert read(decode, bytes(full) + b"\xa3odd" + b"\x91" * 10 + b"\xc0") == message
        deep.append(read(decode, bytes(full) + b"\xa3odd" + b"\x91" * 100_000 + b"\xc0"))
    assert deep == [None] * 3


def test_promised_sizes_take_no_memory() -> None:
    """A list of 2^32 tokens that isn't there is refused before room is made for it."""
    for _, message in MESSAGES[:1]:
        full_token_ids = protocol.encode(message)
        offset = full_token_ids.index(b"prompt_token_ids") + len(b"prompt_token_ids")
        for count in (1 << 20, (1 << 32) - 1):
            data = (
                full_token_ids[:offset]
                + b"\xdd"
                + count.to_bytes(4, "big")
                + full_token_ids[offset + 1 :]
            )
            assert read(protocol.decode_inbox, data) is None
