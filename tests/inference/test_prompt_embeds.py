"""`prompt_embeds` of `/v1/completions`: read without torch, bounded, and refused by name."""

from __future__ import annotations

import base64
import contextlib
import io
import pickle
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.contract.errors import InvalidRequest
from engine.core.input_processor import to_tensor
from inference.rendering.prompt_embeds import read_embeds
from tests.fakes.fake_replica import FakeReplica, expected_tokens
from tests.inference.conftest import Gateway

SIZE = 8


def saved(value: Any, **options: Any) -> str:
    """As vLLM's clients send it."""
    file = io.BytesIO()
    torch.save(value, file, **options)
    return base64.b64encode(file.getvalue()).decode()


def vectors(rows: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, SIZE).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "view",
    [
        lambda embeds: embeds,
        lambda embeds: embeds[2:4],
        lambda embeds: embeds[None],
        lambda embeds: embeds.T.contiguous().T.contiguous(),
        lambda embeds: embeds.requires_grad_(),
        lambda embeds: embeds[:1],
    ],
)
def test_a_tensor_is_read_as_torch_reads_it(
    dtype: torch.dtype, view: Callable[[Tensor], Tensor]
) -> None:
    input_view = view(vectors(dtype=dtype))
    tensor = to_tensor(read_embeds(saved(input_view), SIZE))
    assert tensor.dtype == dtype
    assert torch.equal(tensor, input_view.detach().reshape(-1, SIZE))


def packed(pickled: bytes, numbers: bytes = b"\0" * 64, **options: Any) -> str:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", numbers)
    return base64.b64encode(file.getvalue()).decode()


class Evil:
    """What an unpickler would run."""

    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('unpickled')",))


def altered(find: bytes, replacement: bytes) -> str:
    """A tensor's file with other words in its pickle."""
    file = io.BytesIO()
    torch.save(vectors(), file)
    with zipfile.ZipFile(file) as archive:
        return packed(archive.read("archive/data.pkl").replace(find, replacement), b"\0" * 160)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not base64!",
        base64.b64encode(b"PK\x03\x04 no archive").decode(),
        packed(b""),
        packed(pickle.dumps(Evil(), 2)),
        packed(pickle.dumps([1, 2, 3], 2)),
        packed(b"\x80\x02" + b"(" * 2000 + b"."),
        packed(b"\x80\x02" + b"K\x01" * 100_000 + b"."),
        packed(b"\x80\x02t."),
        altered(b"FloatStorage", b"exec        "),
        altered(b"_rebuild_tensor_v2", b"_rebuild_parameter"),
        packed(pickle.dumps([1], 2), compression=zipfile.ZIP_DEFLATED),
        saved({"a": vectors()}),
        saved([vectors()]),
        saved(vectors().double()),
        saved(vectors().to_sparse()),
        saved(torch.zeros(SIZE)),
        saved(torch.zeros(2, 3, SIZE)),
        saved(torch.zeros(0, SIZE)),
        saved(torch.zeros(5, SIZE + 1)),
        saved(torch.zeros(1, SIZE).expand(9, SIZE)),
        saved(torch.zeros(SIZE, 4).T),
        saved(vectors(), _use_new_zipfile_serialization=False),
        altered(b"K\x05K\x08\x86", b"K\x7fK\x08\x86"),  # more rows than there are
        altered(b"K\x05K\x08\x86", b"\x8a\x08" + b"\xff" * 7 + b"\x7fK\x08\x86"),
    ],
)
def test_what_is_no_such_tensor_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        read_embeds(text, SIZE)
    assert refusal.value.param == "prompt_embeds"


def test_damage_is_refused_or_harmless() -> None:
    file = bytearray(base64.b64decode(saved(vectors())))
    for index in range(len(file)):
        for bit in (1, 128):
            file[index] ^= bit
            with contextlib.suppress(InvalidRequest):
                assert read_embeds(base64.b64encode(file).decode(), SIZE).is_complete
            file[index] ^= bit


@pytest.fixture
def replica(gateway: Gateway) -> FakeReplica:
    replica = gateway.fake()
    replica.model.prompt_embeds_size = SIZE
    return replica


@pytest.mark.parametrize("prompt", [None, "", "x"])
@pytest.mark.parametrize("stream", [False, True])
async def test_vectors_reach_the_engine_and_count_as_tokens(
    gateway: Gateway, replica: FakeReplica, prompt: Any, stream: bool
) -> None:
    first, second = vectors(3), vectors(4, torch.bfloat16)
    body = {
        "model": "fake",
        "prompt": prompt,
        "prompt_embeds": [saved(first), saved(second)],
        "max_tokens": 4,
        "return_token_ids": True,
        "stream": stream,
        "stream_options": {"include_usage": True} if stream else None,
    }
    async with gateway.serving(replica):
        reply = await gateway.client.post("/v1/completions", body)
    assert reply.status == 200
    events = reply.events[:-1] if stream else [reply.json()]
    texts, asked = 1 if prompt else 0, replica.received
    assert events[-1]["usage"]["prompt_tokens"] - 7 == (
        len(asked[2].prompt_token_ids) if texts else 0
    )
    choices = [choice for chunk in events for choice in chunk["choices"]]
    assert {choice["index"] for choice in choices} == set(range(2 + texts))
    assert not any(choice["prompt_token_ids"] for choice in choices if choice["index"] < 2)
    sent = [request.prompt_embeds for request in asked]
    assert len(sent) == 2 + texts
    for embeds, received_embeds in zip((first, second), sent, strict=False):
        assert received_embeds is not None
        assert torch.equal(to_tensor(received_embeds), embeds)
    assert sent[2:] == [None] * texts
    tokens = [token for choice in choices if choice["index"] == 0 for token in choice["token_ids"]]
    assert tokens == expected_tokens([0] * 3, 4, low=replica.low, high=replica.high)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_embeds": "x"}, "prompt_embeds"),
        ({"prompt_embeds": 5}, "prompt_embeds"),
        ({"prompt_embeds": [5]}, "prompt_embeds[0]"),
        ({"prompt_embeds": []}, "prompt"),
        ({"prompt_embeds": saved(torch.zeros(5000, SIZE))}, "prompt"),
        ({"prompt_embeds": saved(vectors()), "echo": True}, "echo"),
        ({"prompt_embeds": saved(vectors()), "suffix": "x"}, "suffix"),
        (
            {"prompt_embeds": saved(vectors()), "truncate_prompt_tokens": 2},
            "truncate_prompt_tokens",
        ),
        ({"prompt_embeds": [saved(vectors())] * 3, "n": 1000}, "n"),
    ],
)
async def test_what_cant_be_is_refused_by_name(
    gateway: Gateway, replica: FakeReplica, fields: dict[str, Any], param: str
) -> None:
    async with gateway.serving(replica):
        reply = await gateway.client.post("/v1/completions", {"model": "fake", **fields})
    assert (reply.status, reply.error["param"]) == (400, param)


async def test_replicas_must_be_told_to_take_them(gateway: Gateway) -> None:
    body = {"model": "fake", "prompt_embeds": saved(vectors())}
    async with gateway.serving(gateway.fake()):
        reply = await gateway.client.post("/v1/completions", body)
    assert (reply.status, reply.error["code"]) == (400, "unsupported_parameter")
    assert "--enable-prompt-embeds" in reply.error["message"]


async def test_they_have_no_token_ids_to_render(gateway: Gateway, replica: FakeReplica) -> None:
    body = {"model": "fake", "prompt_embeds": saved(vectors())}
    async with gateway.serving(replica):
        reply = await gateway.client.post("/v1/completions/render", body)
    assert (reply.status, reply.error["param"]) == (400, "prompt_embeds")


async def test_chats_take_none(gateway: Gateway, replica: FakeReplica) -> None:
    async with gateway.serving(replica):
        reply = await gateway.client.chat(prompt_embeds=saved(vectors()))
    assert (reply.status, reply.error["param"]) == (400, "prompt_embeds")
