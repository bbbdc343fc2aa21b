"""Media in messages of offline chats, in the formats of vLLM and `transformers`."""

from __future__ import annotations

import base64
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from typing import Any
from urllib.request import Request, urlopen

from engine.contract.errors import InvalidRequest
from engine.multimodal.processor import open_image
from engine.multimodal.video_files import read_video

#: The environment variable of the timeout in seconds, and vLLM's default.
_FETCH_TIMEOUT = "VLLM_IMAGE_FETCH_TIMEOUT", 5.0
MAX_FILE_BYTES = 64 << 20
#: Functions from a file to an item of `multi_modal_data`, by kind.
Readers = Mapping[str, Callable[[bytes], Any]]
#: Fields of parts with media -> their kinds.
_KINDS = {
    "image_url": "image",
    "image_pil": "image",
    "image_embeds": "image",
    "image": "image",
    "video_url": "video",
    "video": "video",
    "audio_url": "audio",
    "input_audio": "audio",
    "audio_embeds": "audio",
    "audio": "audio",
}


def extract_media(
    messages: Sequence[Any], sampling: dict[str, Any] | None = None
) -> tuple[list[Any], dict[str, list[Any]]]:
    """Return the messages with media replaced by parts that templates support, and the media as
    `multi_modal_data`. `sampling` is the options of `read_video`.

    Raises `InvalidRequest` for media that can't be read.
    """
    media: defaultdict[str, list[Any]] = defaultdict(list)
    readers: Readers = {
        "image": open_image,
        "video": lambda data: read_video(data, sampling),
        "audio": bytes,
    }
    replaced = [
        {**message, "content": [_extract_part(part, media, readers) for part in message["content"]]}
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
    return replaced, dict(media)


def _extract_part(part: Any, media: defaultdict[str, list[Any]], readers: Readers) -> Any:
    if not isinstance(part, dict):
        return part
    if part.get("thinking") is not None:
        return {"type": "text", "text": part["thinking"]}
    name = next((name for name in _KINDS if part.get(name) is not None), None)
    if name is None:
        return part
    value, kind = part[name], _KINDS[name]
    if isinstance(value, dict) and name == "input_audio":
        value = f"data:;base64,{value.get('data')}"
    elif isinstance(value, dict) and name.endswith("_url"):
        value = value.get("url")
    media[kind].append(readers[kind](_read(value, kind)) if isinstance(value, str) else value)
    return {"type": kind}


def _read(url: str, kind: str) -> bytes:
    """Return the content of a `data:` or http(s) URL. Raises `InvalidRequest` for other URLs,
    failed requests and too large files.
    """
    variable, default = _FETCH_TIMEOUT
    try:
        if url.startswith("data:"):
            return base64.b64decode(url.partition(",")[2], validate=True)
        if not url.startswith(("http://", "https://")):
            raise InvalidRequest(
                f"The address of an {kind} must begin with data:, http:// or https://. Open files "
                "yourself, and pass PIL images as image_pil.",
                param="messages",
            )
        timeout_s = float(os.environ.get(variable) or default)
        with urlopen(Request(url), timeout=timeout_s) as answer:  # noqa: S310
            data: bytes = answer.read(MAX_FILE_BYTES + 1)
    except (OSError, HTTPException, ValueError) as error:
        raise InvalidRequest(f"The {kind} can't be read: {error}", param="messages") from error
    if len(data) > MAX_FILE_BYTES:
        raise InvalidRequest(f"The {kind} has over {MAX_FILE_BYTES} bytes.", param="messages")
    return data
