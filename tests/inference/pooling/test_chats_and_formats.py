"""Chats as input, cutting at either side, and vectors in other number formats, as vLLM has them."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import numpy as np
import pytest

from inference.api.pooling.job import encoded_by_entry
from tests.engine.pooling.models import TEXTS
from tests.inference.conftest import Gateway
from tests.inference.pooling.conftest import Serve

TEMPLATE = (
    "{% for m in messages %}{{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}dog{% endif %}"
)
CHAT = [{"role": "user", "content": "the dog"}, {"role": "assistant", "content": "a fox"}]
RENDERED = "the dog a fox "


async def vectors_of(gateway: Gateway, path: str = "/v1/embeddings", **body: Any) -> Any:
    """The vectors of an answer, and its usage."""
    reply = await gateway.client.post(path, {"model": "embed", **body})
    assert reply.status == 200, reply.body
    data = reply.json()["data"]
    return [client.get("embedding", client.get("data")) for client in data], reply.json()["usage"]


async def test_a_chat_is_embedded_as_its_template_renders_it(
    gateway: Gateway, serve: Serve
) -> None:
    async with serve("embed", chat_template=TEMPLATE):
        baseline, usage = await vectors_of(gateway, input=RENDERED, add_special_tokens=False)
        chat, chat_usage = await vectors_of(gateway, messages=CHAT)
        assert (chat, chat_usage) == (baseline, usage)
        assert (await vectors_of(gateway, "/invocations", messages=CHAT))[0] == baseline
        assert (await vectors_of(gateway, input=CHAT))[0] == baseline
        several, _ = await vectors_of(gateway, messages=[CHAT, CHAT[:1]])
        assert (several[0], len(several)) == (baseline[0], 2)

        prompted, _ = await vectors_of(gateway, input=RENDERED + "dog", add_special_tokens=False)
        assert (await vectors_of(gateway, messages=CHAT, add_generation_prompt=True))[0] == prompted
        full, full_usage = await vectors_of(gateway, input=RENDERED)
        special, special_usage = await vectors_of(gateway, messages=CHAT, add_special_tokens=True)
        assert (special, special_usage) == (full, full_usage)

        for fields in (
            {"truncate_prompt_tokens": 4},
            {"truncate_prompt_tokens": 4, "truncation_side": "left"},
        ):
            options = fields | {"add_special_tokens": True}
            cut, cut_usage = await vectors_of(gateway, messages=CHAT, **options)
            assert cut_usage["prompt_tokens"] == 4
            assert cut == (await vectors_of(gateway, input=RENDERED, **options))[0]
        reply = await gateway.client.post("/pooling", {"model": "embed", "messages": CHAT})
        assert reply.json()["data"][0]["data"] == baseline[0]


async def test_a_text_loses_its_end_or_its_beginning(gateway: Gateway, serve: Serve) -> None:
    cut: dict[str, Any] = {"truncate_prompt_tokens": 2, "add_special_tokens": False}
    async with serve("embed"):
        right, _ = await vectors_of(gateway, input=[[40, 41, 42]], **cut)
        truncated, _ = await vectors_of(
            gateway, input=[[40, 41, 42]], truncation_side="left", **cut
        )
        assert right == (await vectors_of(gateway, input=[[40, 41]]))[0]
        assert truncated == (await vectors_of(gateway, input=[[41, 42]]))[0]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 0), ("bfloat16", 4e-3), ("fp8_e5m2", 0.13)]
)
async def test_vectors_as_base64_and_as_bytes(
    gateway: Gateway, serve: Serve, dtype: str, tolerance: float
) -> None:
    import torch

    kind = getattr(torch, {"fp8_e5m2": "float8_e5m2"}.get(dtype, dtype))
    async with serve("embed"):
        baseline, usage = await vectors_of(gateway, input=TEXTS)
        expected = np.float32(baseline)

        def read(raw: bytes, big: bool) -> Any:
            if big:
                width = kind.itemsize
                raw = np.frombuffer(raw, f"V{width}").reshape(-1, 1).view("u1")[:, ::-1].tobytes()
            return torch.frombuffer(bytearray(raw), dtype=kind).float().reshape(len(TEXTS), -1)

        for endianness in ("native", "big"):
            options = {"embed_dtype": dtype, "endianness": endianness}
            packed, _ = await vectors_of(gateway, input=TEXTS, encoding_format="base64", **options)
            raw = b"".join(map(base64.b64decode, packed))
            np.testing.assert_allclose(read(raw, endianness == "big"), expected, atol=tolerance)
            for encoding in ("bytes", "bytes_only"):
                body = {"model": "embed", "input": TEXTS, "encoding_format": encoding, **options}
                reply = await gateway.client.post("/v1/embeddings", body)
                assert (reply.status, reply.body) == (200, raw)
                assert reply.headers["content-type"] == "application/octet-stream"
                assert ("metadata" in reply.headers) == (encoding == "bytes")
                if encoding == "bytes":
                    payload = json.loads(reply.headers["metadata"])
                    assert (payload["model"], payload["usage"]) == ("embed", usage)
                    size = len(raw) // len(TEXTS)
                    assert payload["data"][1] == {
                        "index": 1,
                        "embed_dtype": dtype,
                        "endianness": endianness,
                        "start": size,
                        "end": 2 * size,
                        "shape": [32],
                    }


async def test_a_header_describes_256_vectors_and_no_more(gateway: Gateway, serve: Serve) -> None:
    cases = (("bytes", 256, 200), ("bytes", 257, 400), ("bytes_only", 257, 200))
    async with serve("embed"):
        for encoding, count, status in cases:
            body = {"model": "embed", "input": ["x"] * count, "encoding_format": encoding}
            reply = await gateway.client.post("/v1/embeddings", body)
            assert reply.status == status
            if status == 400:
                assert reply.json()["error"]["param"] == "encoding_format"


def test_an_answer_is_written_entry_by_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of the encoder holds up everybody: none gets more than one vector."""
    written: list[Any] = []

    def encode(value: Any) -> bytes:
        written.append(value)
        return msgspec.json.encode(value)

    monkeypatch.setattr("inference.api.pooling.job._encode", encode)
    entry = {"object": "embedding", "index": 0, "embedding": [0.1, -2.5e-8, 3.0]}
    for data in ([entry], [entry] * 3, ["\u00e9", None, 1.5, [1, 2]]):
        body = {"id": 'a "name"', "created": 7, "data": data, "usage": {"prompt_tokens": 3}}
        assert encoded_by_entry(body) == msgspec.json.encode(body)
        assert data not in written
    assert encoded_by_entry({"data": []}) == b'{"data":[]}'


async def test_what_is_wrong_with_a_chat_or_a_format_is_said(
    gateway: Gateway, serve: Serve
) -> None:
    async def refused(**body: Any) -> Any:
        reply = await gateway.client.post("/v1/embeddings", {"model": "embed", **body})
        assert reply.status == 400, reply.body
        return reply.error

    async with serve("embed"):
        assert (await refused(messages=CHAT))["message"].startswith(
            "The model has no chat template"
        )
    async with serve("embed", chat_template=TEMPLATE):
        assert (await refused(messages=CHAT, input="x"))["param"] == "messages"
        assert (await refused(messages=[{"role": "nobody"}]))["param"].startswith("messages")
        assert (await refused(messages=[]))["param"] == "messages"
        assert (await refused(messages=CHAT, chat_template="{{ 1 }}"))["param"] == "chat_template"
        assert (await refused(messages=CHAT * 40))["code"] == "context_length_exceeded"
        error = await refused(input=["x"] * 257, encoding_format="bytes")
        assert (error["param"], "holds 256 of them, not 257" in error["message"]) == (
            "encoding_format",
            True,
        )
