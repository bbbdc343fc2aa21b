"""Messages of the releases before and after: golden bytes, unknown fields, versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.contract import messages
from engine.contract.lora import AdapterRef
from engine.contract.message_version import (
    MESSAGE_VERSION,
    decode_unreadable_request,
    is_compatible,
)
from engine.contract.messages import (
    AbortRequest,
    ControlReply,
    ControlRequest,
    EngineRequest,
    ErrorInfo,
    FlightRecord,
    FollowPrefill,
    Heartbeat,
    MediaItem,
    ModelInfo,
    OutboxBatch,
    PromptEmbeds,
    ReplicaEvent,
    TokenDelta,
    TokenLogprobs,
    decode_inbox,
    decode_outbox,
    decode_replica_event,
    encode,
)
from engine.contract.pooling_params import PoolingParams
from engine.contract.sampling_params import SamplingParams
from engine.contract.structured_outputs import StructuredOutputsParams
from engine.serving.inbox import decode_message

#: What releases with messages of version 1 write, as hexadecimal digits. It isn't written anew:
#: a change that breaks it breaks rolling upgrades.
GOLDEN: dict[str, str] = json.loads(Path(__file__).with_name("messages_v1.json").read_text())

REQUEST = EngineRequest(
    request_id="r1",
    gateway_id="g1",
    prompt_token_ids=[1, 2, 300],
    sampling=SamplingParams(
        n=2,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        max_tokens=7,
        min_tokens=1,
        seed=11,
        stop=["end"],
        stop_token_ids=[3],
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logprobs=2,
        prompt_logprobs=1,
        ignore_eos=True,
        logit_bias={4: 1.5},
        structured_outputs=StructuredOutputsParams(json={"type": "object"}),
    ),
    arrival_time=12.5,
    tenant="acme",
    weight=2.0,
    kv_reserved_fraction=0.1,
    kv_max_fraction=0.5,
    priority=3,
    cache_namespace="salt",
    adapter=AdapterRef(digest="ab" * 32, name="tone", path="/adapters/ab", owner="acme"),
    resume_token_ids=[[5, 6]],
    skip_indices=[1],
    token_cap=9,
    trace_headers={"traceparent": "00-1-2-01"},
    prompt_embeds=PromptEmbeds("float32", 1, 1, b"\0\0\0\0"),
    media=[MediaItem("image", b"d" * 32, ((1, 2),), (1, 2, 2))],
    media_data={b"d" * 32: b"pixels"},
    isolated=True,
)
MESSAGES: dict[str, Any] = {
    "request": REQUEST,
    "shortest request": EngineRequest(request_id="r2", gateway_id="g1", prompt_token_ids=[1]),
    "pooling": EngineRequest(
        request_id="r3",
        gateway_id="g1",
        prompt_token_ids=[1],
        pooling=PoolingParams(task="embed", dimensions=8),
    ),
    "abort": AbortRequest(request_id="r1", index=1, finish_reason="stop"),
    "follow prefill": FollowPrefill(
        request=EngineRequest(request_id="r1", gateway_id="g1", prompt_token_ids=[1], kv_peer="p")
    ),
    "control": ControlRequest(command="sleep", control_id="c1", gateway_id="g1", level=2),
    "outbox": OutboxBatch(
        replica_id="m-0",
        incarnation="i1",
        step=4,
        deltas=[
            TokenDelta(
                request_id="r1",
                index=1,
                token_ids=[7],
                start=2,
                logprobs=[TokenLogprobs([7, 8], [-0.5, -1.0], [1, 2])],
                num_prompt_tokens=3,
                num_cached_tokens=1,
            ),
            TokenDelta(
                request_id="r2",
                finish_reason="error",
                error=ErrorInfo(message="No.", status=400, code="bad", param="n"),
                flight=FlightRecord(queue_time=0.5, prefill_chunks=1, chunks=[(1, 2)]),
            ),
        ],
        replies=[ControlReply(control_id="c1", ok=True)],
    ),
    "heartbeat": Heartbeat(
        replica_id="m-0",
        incarnation="i1",
        state="ready",
        model=ModelInfo(name="m", path="/m", max_model_len=64, vocab_size=32, dtype="float32"),
        at=2.0,
        progress_at=1.5,
        pid=7,
        host="node",
    ),
    "event": ReplicaEvent(replica_id="m-0", incarnation="i1", held=["r1"]),
}
DECODERS = {
    "outbox": decode_outbox,
    "heartbeat": messages.decode_heartbeat,
    "event": decode_replica_event,
}


def test_every_example_has_golden_bytes() -> None:
    assert GOLDEN.keys() == MESSAGES.keys()


@pytest.mark.parametrize("name", MESSAGES)
def test_this_release_reads_what_version_1_writes(name: str) -> None:
    decode: Any = DECODERS.get(name, decode_inbox)
    assert decode(bytes.fromhex(GOLDEN[name])) == MESSAGES[name]


@pytest.mark.parametrize("name", MESSAGES)
def test_version_1_reads_what_this_release_writes(name: str) -> None:
    """Byte for byte: a field that version 1 doesn't know isn't sent while it has its default."""
    assert encode(MESSAGES[name]).hex() == GOLDEN[name]


@pytest.mark.parametrize("name", MESSAGES)
def test_a_field_of_a_later_release_is_ignored(name: str) -> None:
    fields = msgspec.msgpack.decode(bytes.fromhex(GOLDEN[name]))
    decode: Any = DECODERS.get(name, decode_inbox)
    assert decode(msgspec.msgpack.encode(fields | {"of_a_later_release": 1})) == MESSAGES[name]


def test_a_sampling_parameter_of_a_later_release_is_refused_in_a_sentence() -> None:
    fields = msgspec.msgpack.decode(bytes.fromhex(GOLDEN["request"]))
    fields["sampling"]["later"] = 1
    refused: Any = decode_message(msgspec.msgpack.encode(fields | {"message_version": 2}))
    assert (refused.request_id, refused.gateway_id, refused.num_sequences) == ("r1", "g1", 2)
    assert "unknown field `later`" in refused.error.message
    assert "writes messages of version 2, the replica reads those of version 1" in (
        refused.error.message
    )


@pytest.mark.parametrize("sampling", [{"n": 10**9}, {"n": 0}, {"n": -1}, {"best_of": 10**9}])
def test_a_request_for_a_number_of_outputs_that_none_can_have_is_no_request(
    sampling: dict[str, int],
) -> None:
    """Each output would get an error of its own: the replica's memory, or none at all."""
    fields = msgspec.msgpack.decode(bytes.fromhex(GOLDEN["shortest request"]))
    with pytest.raises(msgspec.ValidationError):
        decode_message(msgspec.msgpack.encode(fields | {"sampling": sampling}))


def test_a_request_of_a_distant_release_is_refused_in_a_sentence() -> None:
    fields = msgspec.msgpack.decode(bytes.fromhex(GOLDEN["request"]))
    refused: Any = decode_message(msgspec.msgpack.encode(fields | {"message_version": 9}))
    assert "update the older one" in refused.error.message


def test_what_is_no_request_is_no_unreadable_request_either() -> None:
    for data in (b"", b"\xff", encode(AbortRequest(request_id="r1"))):
        with pytest.raises(msgspec.DecodeError):
            decode_unreadable_request(data, "")


def test_versions_are_compatible_with_their_neighbours() -> None:
    versions = [version for version in range(-1, 9) if is_compatible(version)]
    assert versions == [MESSAGE_VERSION - 1, MESSAGE_VERSION, MESSAGE_VERSION + 1]
