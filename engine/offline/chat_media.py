"""Media in messages of offline chats, in the formats of vLLM and `transformers`."""

from __future__ import annotations

import base64
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from engine.contract.errors import ConfigError, InvalidRequest
from engine.multimodal.inputs import path_of_file_url
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


@dataclass(frozen=True)
class MediaAccess:
    """What addresses in messages may name, by vLLM's settings of the same names.

    Attributes:
        allowed_local_media_path: the folder whose files `file:` addresses name; "" for none.
        allowed_media_domains: hosts that are asked; empty for all.

    Raises `ConfigError` for another type, and a folder that doesn't exist.
    """

    allowed_local_media_path: str = ""
    allowed_media_domains: Sequence[str] = ()

    def __post_init__(self) -> None:
        folder, domains = self.allowed_local_media_path, self.allowed_media_domains
        if not isinstance(folder, str | Path) or (str(folder) and not Path(folder).is_dir()):
            raise ConfigError(
                f"allowed_local_media_path must be an existing folder; got {folder!r}.",
                param="allowed_local_media_path",
            )
        if not isinstance(domains, list | tuple) or not all(isinstance(x, str) for x in domains):
            raise ConfigError(
                f"allowed_media_domains must be a list of hosts; got {domains!r}.",
                param="allowed_media_domains",
            )

    def check_host(self, url: str) -> None:
        """Raise PermissionError if its host may not be asked."""
        hosts = [host.lower() for host in self.allowed_media_domains]
        if hosts and urlsplit(url).hostname not in hosts:
            raise PermissionError("its host is none of allowed_media_domains")

    def read_file(self, url: str) -> bytes:
        """Return the content of a `file:` address. Raises OSError for one outside of the folder."""
        with path_of_file_url(url, Path(self.allowed_local_media_path)).open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)


class _Redirects(HTTPRedirectHandler):
    """Follows redirects to hosts that may be asked."""

    def __init__(self, access: MediaAccess) -> None:
        self._access = access

    def redirect_request(  # type: ignore[no-untyped-def]
        self, req, fp, code, msg, headers, newurl: str
    ) -> Request | None:
        self._access.check_host(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def extract_media(
    messages: Sequence[Any],
    sampling: dict[str, Any] | None = None,
    access: MediaAccess = MediaAccess(),
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
        {
            **message,
            "content": [_extract_part(part, media, readers, access) for part in message["content"]],
        }
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
    return replaced, dict(media)


def _extract_part(
    part: Any, media: defaultdict[str, list[Any]], readers: Readers, access: MediaAccess
) -> Any:
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
    if isinstance(value, str):
        value = readers[kind](_read(value, kind, access))
    media[kind].append(value)
    return {"type": kind}


def _read(url: str, kind: str, access: MediaAccess) -> bytes:
    """Return the content of a `data:`, http(s) or `file:` URL. Raises `InvalidRequest` for other
    URLs, what `access` doesn't allow, failed requests and too large files.
    """
    try:
        if url.startswith("data:"):
            return base64.b64decode(url.partition(",")[2], validate=True)
        if url.startswith("file:") and access.allowed_local_media_path:
            data = access.read_file(url)
        elif url.startswith(("http://", "https://")):
            data = _fetch(url, access)
        else:
            raise InvalidRequest(
                f"The address of the {kind} must begin with data:, http:// or https://. Open files "
                "yourself, and pass PIL images as image_pil, or set allowed_local_media_path.",
                param="messages",
            )
    except (OSError, HTTPException, ValueError) as error:
        raise InvalidRequest(f"The {kind} can't be read: {error}", param="messages") from error
    if len(data) > MAX_FILE_BYTES:
        raise InvalidRequest(f"The {kind} has over {MAX_FILE_BYTES} bytes.", param="messages")
    return data


def _fetch(url: str, access: MediaAccess) -> bytes:
    variable, default = _FETCH_TIMEOUT
    timeout_s = float(os.environ.get(variable) or default)
    access.check_host(url)
    with build_opener(_Redirects(access)).open(Request(url), timeout=timeout_s) as answer:  # noqa: S310
        content: bytes = answer.read(MAX_FILE_BYTES + 1)
    return content
