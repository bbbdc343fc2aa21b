"""Vectors of pictures over HTTP, as vLLM has them: `messages` of `/v1/embeddings`."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.engine.multimodal.colqwen2 import expected_vectors, make_colqwen2
from tests.engine.multimodal.models import llava, picture
from tests.engine.multimodal.test_picture_embeddings import dual_encoder, normalized
from tests.inference.conftest import Gateway
from tests.inference.pooling.conftest import Serve


def image_part(image: Image.Image) -> dict[str, Any]:
    file = io.BytesIO()
    image.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def message(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


async def test_clip_embeds_an_image_or_a_text(
    gateway: Gateway, serve: Serve, folders: dict[str, Path], tmp_path: Path
) -> None:
    model, images, _ = dual_encoder(tmp_path, "clip")
    folders["clip"] = tmp_path
    image, text = picture(1, 60, 40), {"type": "text", "text": "a cat"}
    pixels = images([image], return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        expected_vector = normalized(model.get_image_features(pixel_values=pixels))[0].tolist()
    async with serve("clip", dtype="float32"):
        body: dict[str, Any] = {"model": "clip", "messages": [message(image_part(image))]}
        reply = await gateway.client.post("/v1/embeddings", body)
        assert reply.status == 200, reply.body
        assert reply.json()["data"][0]["embedding"] == pytest.approx(expected_vector, abs=2e-5)
        usage = reply.json()["usage"]
        assert usage["prompt_tokens_details"]["image_tokens"] == usage["prompt_tokens"] == 1
        from_input = await gateway.client.post(
            "/v1/embeddings", {"model": "clip", "input": "a cat"}
        )
        nothing = {"role": "assistant", "content": None}
        for content in ("a cat", ["a cat"], [text], [{"refusal": "a cat", "type": "refusal"}]):
            body["messages"] = [nothing, {"role": "user", "content": content}]
            chat = await gateway.client.post("/v1/embeddings", body)
            assert chat.json()["data"] == from_input.json()["data"]
        for messages in (
            message(image_part(image), text), [nothing], [{"role": "user", "content": ""}]
        ):  # fmt: skip
            refused = await gateway.client.post("/v1/embeddings", body | {"messages": messages})
            assert refused.status == 400
            assert refused.json()["error"]["param"] == "messages"


async def test_a_chat_with_an_image_is_embedded_and_not_cut(
    gateway: Gateway, serve: Serve, folders: dict[str, Path], tmp_path: Path
) -> None:
    llava(tmp_path)
    folders["llava"] = tmp_path
    options = {"dtype": "float32", "runner": "pooling", "num_gpu_blocks_override": 64}
    async with serve("llava", **options):
        vectors = []
        for seed in (1, 2, 1):
            messages = message(image_part(picture(seed, 60, 40)), {"type": "text", "text": "?"})
            body = {"model": "llava", "messages": messages}
            reply = await gateway.client.post("/v1/embeddings", body)
            assert reply.status == 200, reply.body
            vectors.append(reply.json()["data"][0]["embedding"])
        assert vectors[0] == vectors[2] != vectors[1]
        for path in ("/v1/embeddings", "/pooling", "/tokenize"):
            replies = []
            for content in (None, ""):
                messages = [{"role": "user", "content": content}]
                reply = await gateway.client.post(path, {"model": "llava", "messages": messages})
                assert reply.status == 200, reply.body
                replies.append(reply.json().get("data") or reply.json()["tokens"])
            assert replies[0] == replies[1]
        refused = await gateway.client.post("/v1/embeddings", body | {"truncate_prompt_tokens": 5})
        assert refused.status == 400
        assert refused.json()["error"]["param"] == "truncate_prompt_tokens"


async def test_colqwen2_embeds_pages_and_questions_as_its_processor_writes_them(
    gateway: Gateway, serve: Serve, folders: dict[str, Path], tmp_path: Path
) -> None:
    model, processor = make_colqwen2(tmp_path)
    folders["col"] = tmp_path
    image = picture(1, 60, 40)
    cases: list[tuple[Any, torch.Tensor]] = [
        (message(image_part(image)), expected_vectors(model, processor, images=[image])),
        (
            [{"role": "user", "content": "a cat?"}],
            expected_vectors(model, processor, text=["a cat?"]),
        ),
    ]
    async with serve("col", dtype="float32", num_gpu_blocks_override=64):
        for messages, expected_rows in cases:
            body = {"model": "col", "messages": messages}
            reply = await gateway.client.post("/pooling", body)
            assert reply.status == 200, reply.body
            rows = torch.tensor(reply.json()["data"][0]["data"])
            assert torch.allclose(rows, expected_rows, atol=2e-4)
        refused = await gateway.client.post("/v1/embeddings", body)
        assert refused.status == 400
        assert "token_embed" in refused.json()["error"]["message"]
