"""Images in messages of offline chats, in the formats of vLLM and `transformers`."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any
from urllib.request import Request, urlopen

from engine.contract.errors import InvalidRequest
from engine.multimodal.processor import open_image

#: vLLM's default of VLLM_IMAGE_FETCH_TIMEOUT.
FETCH_TIMEOUT_S = 5.0
MAX_FILE_BYTES = 64 << 20
_IMAGE_FIELDS = ("image_url", "image_pil", "image")
_OTHER_MEDIA = ("video_url", "video", "audio_url", "input_audio", "image_embeds")


def extract_images(messages: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The messages with their images replaced by parts that templates support, and the images, as
    PIL images or arrays, in order.

    Raises `InvalidRequest` for an image that can't be read, and for other media.
    """
    images: list[Any] = []
    replaced = [
        {**message, "content": [_extract_part(part, images) for part in message["content"]]}
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
    return replaced, images


def _extract_part(part: Any, images: list[Any]) -> Any:
    if not isinstance(part, dict):
        return part
    if any(part.get(name) is not None for name in _OTHER_MEDIA):
        raise InvalidRequest(
            "Messages of offline chats may hold text and images: pass videos and audio to "
            "generate() as multi_modal_data.",
            param="messages",
        )
    value = next((part[name] for name in _IMAGE_FIELDS if part.get(name) is not None), None)
    if value is None:
        return part
    if isinstance(value, dict):
        value = value.get("url")
    images.append(open_image(_read(value)) if isinstance(value, str) else value)
    return {"type": "image"}


def _read(url: str) -> bytes:
    """The content of a `data:` or http address. Raises `InvalidRequest`."""
    try:
        if url.startswith("data:"):
            return base64.b64decode(url.partition(",")[2], validate=True)
        if not url.startswith(("http://", "https://")):
            raise InvalidRequest(
                "An image's address must begin with data:, http:// or https://. Open files "
                "yourself, and pass PIL images as image_pil.",
                param="messages",
            )
        with urlopen(Request(url), timeout=FETCH_TIMEOUT_S) as answer:  # noqa: S310
            data: bytes = answer.read(MAX_FILE_BYTES + 1)
    except (OSError, HTTPException, ValueError) as error:
        raise InvalidRequest(f"The image can't be read: {error}", param="messages") from error
    if len(data) > MAX_FILE_BYTES:
        raise InvalidRequest(f"The image has over {MAX_FILE_BYTES} bytes.", param="messages")
    return data
