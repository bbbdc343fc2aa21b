"""Pictures and videos of a chat: fetched, prepared in processes of their own, and placed in the
prompt.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

import msgspec
from django.conf import settings

from common.db import run_in_db_thread
from common.errors import NotFound
from common.outbound_http import OutboundRequestBlocked, fetch
from engine.contract.errors import EngineUnavailable, InvalidRequest
from engine.contract.messages import MediaItem, ModelInfo
from engine.multimodal.inputs import (
    ANSWERS,
    PreparedPicture,
    PreparedSound,
    PrepareRequest,
    PrepareSoundRequest,
    Refusal,
    folder_version,
)
from engine.multimodal.placeholders import expand_placeholders, locate_media
from engine.system.worker_process import WorkerProcess
from engine.text import Tokenizer
from inference.loop.offload import FairThreadPool
from inference.schemas.chat import IMAGE_PARTS, VIDEO_PART, ChatRequest, part_type
from storage.access import access_file
from storage.blobs import open_blob
from tenants.authentication import Caller

#: Processes that prepare pictures, and threads that fetch them.
NUM_WORKERS, NUM_FETCHERS = 2, 8
#: Of one picture or video; then its process is killed.
PREPARE_TIMEOUTS_S = {"image": 20.0, "video": 60.0}
FETCH_TIMEOUT_S = 10.0
#: The same for a file of sound, which may be hours long.
SOUND_TIMEOUT_S = 120.0
#: What prepared pictures may take in this process, the least recently used go first.
CACHE_BYTES = 128 << 20

#: The field and the kind of parts that are pictures.
_IMAGE = ("image_url", "image")
_COMMAND = "engine.multimodal.worker"


@dataclass(frozen=True, slots=True)
class MediaSource:
    """A picture or video of a message.

    Attributes:
        kind: "image" or "video".
        url: `data:`, https, or `file:` where the operator allows it; "" of a stored file.
        param: names it in errors.
        file_id: of a file that the tenant has uploaded.
        tenant_id: that file's owner.
    """

    url: str
    param: str
    file_id: str = ""
    tenant_id: int = 0
    kind: str = "image"


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """How a request's media are prepared.

    Attributes:
        processor: mm_processor_kwargs.
        sampling: of videos, see `read_video`.
    """

    processor: dict[str, Any]
    sampling: dict[str, Any]

    @classmethod
    def from_chat(cls, chat: ChatRequest, info: ModelInfo) -> MediaOptions:
        """Options of a chat. "fps" and "num_frames" may be among mm_processor_kwargs, as vLLM has
        it. Raises `InvalidRequest` for a model that takes no media.
        """
        for name in ("mm_processor_kwargs", "media_io_kwargs"):
            if getattr(chat, name) and not info.sees:
                raise InvalidRequest(f"The model {info.name} takes no images.", param=name)
        processor = dict(chat.mm_processor_kwargs or {})
        sampling = {
            name: processor.pop(name) for name in ("fps", "num_frames") if name in processor
        }
        return cls(processor, sampling | (chat.media_io_kwargs or {}).get("video", {}))


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered chat: its token ids, and its pictures with what the encoder reads of each."""

    token_ids: list[int]
    media: list[MediaItem]
    media_data: dict[bytes, bytes]


def find_media(messages: Sequence[dict[str, Any]], info: ModelInfo) -> list[MediaSource]:
    """The pictures and videos of checked messages, in their order.

    Raises `InvalidRequest` for a model that takes none, and for more than it takes.
    """
    sources = []
    for number, message in enumerate(messages):
        content = message.get("content")
        for index, part in enumerate(content if isinstance(content, list) else ()):
            kind = part_type(part) if isinstance(part, dict) else "text"
            if kind in (*IMAGE_PARTS, VIDEO_PART):
                name, medium = ("video_url", "video") if kind == VIDEO_PART else _IMAGE
                param = f"messages[{number}].content[{index}]"
                address = part.get(name) or ""
                url = address["url"] if isinstance(address, dict) else address
                file_id = part.get("file_id") or ""
                sources.append(MediaSource(url, param, file_id, kind=medium))
    limits = {"image": info.max_images if info.sees else 0, "video": info.max_videos}
    for medium, limit in limits.items():
        of_kind = [source for source in sources if source.kind == medium]
        if of_kind and not limit:
            raise InvalidRequest(
                f"The model {info.name} takes no {medium}s (parts of type {medium}_url).",
                param=of_kind[0].param,
            )
        if len(of_kind) > limit:
            raise InvalidRequest(
                f"A request may have at most {limit} {medium}s, this one has {len(of_kind)}.",
                param="messages",
            )
    return sources


async def insert_media_tokens(
    token_ids: list[int],
    sources: Sequence[MediaSource],
    options: MediaOptions,
    info: ModelInfo,
    tokenizer: Tokenizer,
    caller: Caller,
) -> ChatPrompt:
    """A chat's prompt with as many tokens for each picture as the model takes.

    Raises:
        InvalidRequest: one can't be fetched or read; the part is named.
        Overloaded: too many of the tenant's pictures wait.
    """
    if not sources:
        return ChatPrompt(token_ids, [], {})
    pool = get_media_pool()
    if any(source.file_id for source in sources):
        sources = await run_in_db_thread(_locate_files, caller, sources)
    pictures = await asyncio.gather(
        *(pool.prepare(source, options, info.path, caller.tenant) for source in sources)
    )
    replacements = [
        tokenizer.encode(picture.replacement, add_special_tokens=False) for picture in pictures
    ]
    expanded, order = expand_placeholders(token_ids, pictures, replacements)
    items = locate_media(expanded, [pictures[index] for index in order])
    return ChatPrompt(expanded, items, {picture.digest: picture.tensors for picture in pictures})


def _locate_files(caller: Caller, sources: Sequence[MediaSource]) -> list[MediaSource]:
    """The sources with the owners of stored files. Raises `InvalidRequest` for another's file."""
    located = []
    for source in sources:
        if source.file_id:
            try:
                row = access_file(caller, source.file_id)
            except NotFound as error:
                raise InvalidRequest(error.message, param=source.param) from None
            source = replace(source, tenant_id=row.tenant_id)
        located.append(source)
    return located


class MediaPool:
    """Fetches and prepares pictures, fair between tenants and beside the event loop."""

    def __init__(self) -> None:
        self._fetchers = FairThreadPool(NUM_FETCHERS, "quire-fetch", "images")
        self._preparers = FairThreadPool(NUM_WORKERS, "quire-media", "images")
        self._worker = threading.local()
        #: Least recently used first. By tenant: how soon an answer comes tells nobody what others
        #: have sent.
        self._prepared: OrderedDict[bytes, PreparedPicture] = OrderedDict()
        self._preparing: dict[bytes, asyncio.Future[PreparedPicture | Refusal]] = {}
        self._cached_bytes = 0

    async def prepare(
        self, source: MediaSource, options: MediaOptions, folder: str, tenant: str
    ) -> PreparedPicture:
        """One picture or video for the model of a folder; the same one of a tenant only once.

        Raises as `insert_media_tokens`.
        """
        data, digest, version = await asyncio.wrap_future(
            self._fetchers.submit(tenant, lambda: (*_read(source), folder_version(folder)))
        )
        sampling = options.sampling if source.kind == "video" else {}
        settled = msgspec.json.encode([source.kind, options.processor, sampling], order="sorted")
        scope = f"{tenant}\0{folder}\0{version}\0".encode()
        key = hashlib.sha256(scope + settled + b"\0" + digest).digest()
        if (cached := self._prepared.get(key)) is not None:
            self._prepared.move_to_end(key)
            return cached
        if (running := self._preparing.get(key)) is None:
            request = msgspec.msgpack.encode(
                PrepareRequest(folder, data, version, options.processor, source.kind, sampling)
            )
            timeout_s = PREPARE_TIMEOUTS_S[source.kind]
            job = self._preparers.submit(tenant, lambda: self._ask(request, timeout_s, source.kind))
            running = self._preparing[key] = asyncio.wrap_future(job)
            running.add_done_callback(lambda done: self._finish(key, done))
        # A client that goes away doesn't take the picture from another that waits for it.
        answer = await asyncio.shield(running)
        if isinstance(answer, Refusal):
            if answer.is_model:
                raise EngineUnavailable(answer.message)
            raise InvalidRequest(answer.message, param=answer.param or source.param)
        return answer

    async def prepare_sound(
        self, data: bytes, num_mels: int, num_frames: int, tenant: str
    ) -> PreparedSound:
        """The windows of a file of sound, for a model's encoder.

        Raises:
            InvalidRequest: it can't be read as sound. Overloaded: too many of the tenant's wait.
        """
        request = msgspec.msgpack.encode(PrepareSoundRequest(data, num_mels, num_frames))
        job = self._preparers.submit(tenant, lambda: self._ask(request, SOUND_TIMEOUT_S, "sound"))
        answer = await asyncio.wrap_future(job)
        if isinstance(answer, PreparedSound):
            return answer
        message = answer.message if isinstance(answer, Refusal) else "The file isn't sound."
        raise InvalidRequest(message, param="file")

    def _finish(self, key: bytes, done: asyncio.Future[Any]) -> None:
        self._preparing.pop(key, None)
        if done.cancelled() or done.exception() is not None:
            return
        if isinstance(picture := done.result(), PreparedPicture):
            self._prepared[key] = picture
            self._cached_bytes += len(picture.tensors)
            while self._cached_bytes > CACHE_BYTES:
                _, oldest = self._prepared.popitem(last=False)
                self._cached_bytes -= len(oldest.tensors)

    def _ask(self, request: bytes, timeout_s: float, kind: str) -> Any:
        """In one of the threads, each of which has a worker."""
        worker: WorkerProcess | None = getattr(self._worker, "process", None)
        if worker is None or not worker.alive:
            worker = self._worker.process = WorkerProcess(_COMMAND, "media worker", nice=10)
        answer = worker.request(request, timeout_s)
        if answer is None:
            return Refusal(f"The {kind} takes too much time or memory to be read.")
        return ANSWERS.decode(answer)


def _read(source: MediaSource) -> tuple[bytes, bytes]:
    """A picture's file and its sha256. Raises `InvalidRequest`."""
    if source.file_id:
        data = _read_file(partial(open_blob, source.tenant_id, source.file_id), source.param)
    elif source.url.startswith("data:"):
        data = _decode_data_url(source)
    elif source.url.startswith("file:"):
        path = _local_path(source)
        data = _read_file(lambda: path.open("rb"), source.param)
    else:
        try:
            data = fetch(
                source.url,
                max_bytes=settings.QUIRE.max_body_bytes,
                timeout_s=FETCH_TIMEOUT_S,
                param=source.param,
                hosts=settings.QUIRE.allowed_media_domains,
            )
        except OutboundRequestBlocked as error:
            raise InvalidRequest(error.message, param=source.param) from error
    return data, hashlib.sha256(data).digest()


def _local_path(source: MediaSource) -> Path:
    """The path of a `file:` address. Raises `InvalidRequest` unless the operator allows it."""
    folder = settings.QUIRE.allowed_local_media_path
    refusal = InvalidRequest("The file of this address may not be read.", param=source.param)
    try:
        parts = urlsplit(source.url)
        path = Path(unquote(parts.path)).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):  # RuntimeError: links in a circle
        raise refusal from None
    # Whether a file outside of the folder exists isn't told.
    if (
        folder is None
        or parts.netloc not in ("", "localhost")
        or not path.is_relative_to(folder)
        or not path.is_file()
    ):
        raise refusal
    return path


def _read_file(open_file: Callable[[], IO[bytes]], param: str) -> bytes:
    limit = settings.QUIRE.max_body_bytes
    try:
        with open_file() as file:
            data = file.read(limit + 1)
    except OSError:
        raise InvalidRequest("The file no longer exists.", param=param) from None
    if len(data) > limit:
        raise InvalidRequest(f"The file has over {limit} bytes.", param=param)
    return data


def _decode_data_url(source: MediaSource) -> bytes:
    """The bytes of `data:image/png;base64,...`. Raises `InvalidRequest` for anything else."""
    head, comma, data = source.url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise InvalidRequest(
            f"A data: address must be data:{source.kind}/...;base64, and then the file.",
            param=source.param,
        )
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(
            f"The {source.kind}'s base64 can't be read: {error}.", param=source.param
        ) from None


@lru_cache(maxsize=1)
def get_media_pool() -> MediaPool:
    """This process's pool."""
    return MediaPool()
