"""Pictures, videos, sound and documents of a chat: fetched, prepared in processes of their own, and
placed in the prompt.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from sys import getsizeof
from typing import IO, Any
from urllib.parse import unquote, urlsplit

import msgspec
from django.conf import settings

from common.db import run_in_db_thread
from common.errors import NotFound
from common.outbound_http import OutboundRequestBlocked, fetch
from engine.contract.errors import EngineUnavailable, InvalidRequest
from engine.contract.messages import MediaItem, ModelInfo
from engine.multimodal.documents import MAX_TEXT_CHARS
from engine.multimodal.inputs import (
    ANSWERS,
    Answer,
    DocumentPage,
    PreparedDocument,
    PrepareDocumentRequest,
    PreparedPicture,
    PreparedSound,
    PrepareRequest,
    PrepareSoundRequest,
    Refusal,
    VoiceDetection,
    folder_version,
)
from engine.multimodal.placeholders import expand_placeholders, locate_media
from engine.system.worker_process import WorkerProcess
from engine.text import Tokenizer
from inference.loop.offload import FairThreadPool
from inference.rendering.prompt_embeds import read_embeds, to_float32
from inference.schemas.chat import (
    AUDIO_PARTS,
    FILE_PART,
    IMAGE_PARTS,
    VIDEO_PART,
    ChatRequest,
    part_type,
)
from metering.media import admit_media, charge_media
from storage.access import access_file
from storage.blobs import open_blob
from tenants.authentication import Caller

#: Processes that prepare pictures, and threads that fetch them.
NUM_WORKERS, NUM_FETCHERS = 2, 8
#: Of one picture, video or document; then its process is killed.
PREPARE_TIMEOUTS_S = {"image": 20.0, "audio": 20.0, "video": 60.0, "document": 60.0}
FETCH_TIMEOUT_S = 10.0
#: The same for a file of sound, which may be hours long.
SOUND_TIMEOUT_S = 120.0
#: What prepared media may take in this process, the least recently used go first.
CACHE_BYTES = 128 << 20

#: The field and the kind of parts that are pictures.
_IMAGE = ("image_url", "image")
#: The field of a part that is a document's page: its picture's file.
PAGE_IMAGE = "page_image"
_COMMAND = "engine.multimodal.worker"


@dataclass(frozen=True, slots=True)
class MediaSource:
    """A picture, video, sound or document of a message.

    Attributes:
        kind: "image", "video", "audio" or "document".
        url: `data:`, https, or `file:` where the operator allows it; "" of a stored file.
        param: names it in errors.
        file_id: of a file that the tenant has uploaded.
        tenant_id: that file's owner.
        filename: of a document, or "".
        data: the file itself, of a document's page; vectors of sound, float32.
        file_bytes: of a stored file.
        embeds_size: length of each vector, where sound comes as vectors.
    """

    url: str
    param: str
    file_id: str = ""
    tenant_id: int = 0
    kind: str = "image"
    filename: str = ""
    data: bytes = b""
    file_bytes: int | None = None
    embeds_size: int = 0

    @property
    def num_bytes(self) -> int | None:
        """Of the file, if they are known before it's fetched."""
        if self.embeds_size:
            return len(self.data)
        return len(self.url) * 3 // 4 if self.url.startswith("data:") else self.file_bytes


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
            if getattr(chat, name) and not (info.sees or info.max_audios):
                raise InvalidRequest(f"The model {info.name} takes no images.", param=name)
        processor = dict(chat.mm_processor_kwargs or {})
        sampling = {
            name: processor.pop(name) for name in ("fps", "num_frames") if name in processor
        }
        return cls(processor, sampling | (chat.media_io_kwargs or {}).get("video", {}))


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered chat.

    Attributes:
        media, media_data: its pictures and sounds, and what the encoder reads of each.
        audio_ms: milliseconds of all sounds.
    """

    token_ids: list[int]
    media: list[MediaItem]
    media_data: dict[bytes, bytes]
    audio_ms: int = 0


def iterate_parts(messages: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The parts of checked messages with the names that errors call them by."""
    for number, message in enumerate(messages):
        content = message.get("content")
        for index, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict):
                yield f"messages[{number}].content[{index}]", part


async def read_documents(
    messages: Sequence[dict[str, Any]], info: ModelInfo, caller: Caller
) -> dict[str, list[dict[str, Any]]]:
    """The documents of checked messages as parts, by the names of the parts that they replace.

    A page of a PDF is a picture and its text, or text alone for a model that takes no images.

    Raises:
        InvalidRequest: one can't be fetched or read; the part is named.
        Overloaded: too many of the tenant's documents wait.
        RateLimited: over a limit on media; before any is fetched.
    """
    sources = [
        _document_source(part["file"], param)
        for param, part in iterate_parts(messages)
        if part_type(part) == FILE_PART
    ]
    if not sources:
        return {}
    if any(source.file_id for source in sources):
        sources = await run_in_db_thread(_locate_files, caller, sources)
    await _admit(caller, sources)
    pool, max_images = get_media_pool(), info.max_images if info.sees else 0
    parts = {}
    num_images = num_chars = 0
    # One after the other: together, a request's documents would take gigabytes before they are
    # counted.
    for source in sources:
        document = await pool.read_document(source, max_images, caller)
        num_images += sum(bool(page.image) for page in document.pages)
        num_chars += sum(len(page.text) for page in document.pages)
        if num_images > max_images or num_chars > MAX_TEXT_CHARS:
            raise InvalidRequest(
                f"The documents of a request may have at most {max_images} images and "
                f"{MAX_TEXT_CHARS} characters; those up to this one have {num_images} and "
                f"{num_chars}.",
                param=source.param,
            )
        if not max_images and not any(page.text for page in document.pages):
            raise InvalidRequest(
                f"The document has no text, and the model {info.name} takes no images.",
                param=source.param,
            )
        parts[source.param] = _document_parts(document.pages, source.filename)
    return parts


def _document_source(file: Mapping[str, str | None], param: str) -> MediaSource:
    url, file_id = file.get("file_url") or "", file.get("file_id") or ""
    if data := file.get("file_data"):
        url = data if data.startswith("data:") else f"data:;base64,{data}"
    return MediaSource(url, param, file_id, kind="document", filename=file.get("filename") or "")


def _document_parts(pages: Sequence[DocumentPage], filename: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for number, page in enumerate(pages, 1):
        lines = [filename] if filename and number == 1 else []
        if len(pages) > 1:
            lines.append(f"Page {number} of {len(pages)}:")
        if page.image:
            if lines:
                parts.append({"type": "text", "text": "\n".join(lines) + "\n"})
            parts.append({"type": "image_url", PAGE_IMAGE: page.image})
            lines = []
        lines.append(page.text or ("" if page.image else "(This page has no text.)"))
        parts.append({"type": "text", "text": "\n".join(lines) + "\n"})
    return parts


def insert_documents(
    messages: Sequence[dict[str, Any]], documents: Mapping[str, Sequence[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """The messages with the parts of `read_documents` in place of their documents."""
    if not documents:
        return list(messages)
    inserted = []
    for number, message in enumerate(messages):
        if isinstance(content := message.get("content"), list):
            parts: list[Any] = []
            for index, part in enumerate(content):
                parts += documents.get(f"messages[{number}].content[{index}]", [part])
            message = {**message, "content": parts}
        inserted.append(message)
    return inserted


def find_media(
    messages: Sequence[dict[str, Any]],
    info: ModelInfo,
    documents: Mapping[str, Sequence[dict[str, Any]]],
) -> list[MediaSource]:
    """The pictures, videos and sounds of checked messages and of their documents, in their order.

    Raises `InvalidRequest` for a model that takes none, and for more than it takes.
    """
    sources = []
    for param, part in iterate_parts(messages):
        kind = part_type(part)
        if kind in (*IMAGE_PARTS, VIDEO_PART):
            name, medium = ("video_url", "video") if kind == VIDEO_PART else _IMAGE
            address = part.get(name) or ""
            url = address["url"] if isinstance(address, dict) else address
            sources.append(MediaSource(url, param, part.get("file_id") or "", kind=medium))
        if kind in AUDIO_PARTS:
            sources.append(_audio_source(part, param, info))
        for page_part in documents.get(param, ()):
            if image := page_part.get(PAGE_IMAGE):
                sources.append(MediaSource("", param, data=image))
    limits = (
        ("image", "images (parts of type image_url)", info.max_images if info.sees else 0),
        ("video", "videos (parts of type video_url)", info.max_videos),
        ("audio", "audio (parts of type audio_url and input_audio)", info.max_audios),
    )
    for medium, noun, limit in limits:
        of_kind = [source for source in sources if source.kind == medium]
        if of_kind and not limit:
            raise InvalidRequest(
                f"The model {info.name} takes no {noun}.",
                param=of_kind[0].param,
            )
        if len(of_kind) > limit:
            raise InvalidRequest(
                f"A request may have at most {limit} {medium}s, this one has {len(of_kind)}.",
                param="messages",
            )
    return sources


def _audio_source(part: Mapping[str, Any], param: str, info: ModelInfo) -> MediaSource:
    if (text := part.get("audio_embeds")) is not None:
        if not info.prompt_embeds_size:
            raise InvalidRequest(
                "audio_embeds aren't accepted: the model's replicas need --enable-prompt-embeds.",
                param=param,
            )
        embeds = read_embeds(text, info.prompt_embeds_size, "audio_embeds", param)
        return MediaSource(
            "", param, kind="audio", data=to_float32(embeds), embeds_size=embeds.size
        )
    address = part.get("audio_url") or ""
    url = address["url"] if isinstance(address, dict) else address
    if (inline := part.get("input_audio")) is not None:
        url = f"data:;base64,{inline['data']}"
    return MediaSource(url, param, part.get("file_id") or "", kind="audio")


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
        RateLimited: over a limit on media; before any is fetched.
    """
    if not sources:
        return ChatPrompt(token_ids, [], {})
    pool = get_media_pool()
    if any(source.file_id for source in sources):
        sources = await run_in_db_thread(_locate_files, caller, sources)
    await _admit(caller, sources)
    pictures = await asyncio.gather(
        *(pool.prepare(source, options, info.path, caller) for source in sources)
    )
    expanded, order = expand_placeholders(token_ids, pictures, tokenizer)
    items = locate_media(expanded, [pictures[index] for index in order])
    audio_ms = sum(math.ceil(1000 * prepared.seconds) for prepared in pictures)
    media_data = {prepared.digest: prepared.tensors for prepared in pictures}
    return ChatPrompt(expanded, items, media_data, audio_ms)


def _locate_files(caller: Caller, sources: Sequence[MediaSource]) -> list[MediaSource]:
    """The sources with owners and names of stored files. Raises `InvalidRequest` for another's."""
    located = []
    for source in sources:
        if source.file_id:
            try:
                row = access_file(caller, source.file_id)
            except NotFound as error:
                raise InvalidRequest(error.message, param=source.param) from None
            name = source.filename or row.filename
            source = replace(source, tenant_id=row.tenant_id, filename=name, file_bytes=row.size)
        located.append(source)
    return located


async def _admit(caller: Caller, sources: Sequence[MediaSource]) -> None:
    """Count them in the limits on media, but pages: their document counted. See `admit_media`."""
    if requested := [source for source in sources if not source.data or source.embeds_size]:
        num_bytes = sum(source.num_bytes or 0 for source in requested)
        param = requested[0].param
        await admit_media(caller, count=len(requested), num_bytes=num_bytes, param=param)


class MediaPool:
    """Fetches and prepares media, fair between tenants and beside the event loop."""

    def __init__(self) -> None:
        self._fetchers = FairThreadPool(NUM_FETCHERS, "quire-fetch", "images")
        self._preparers = FairThreadPool(NUM_WORKERS, "quire-media", "images")
        self._worker = threading.local()
        #: Least recently used first. By tenant: how soon an answer comes tells nobody what others
        #: have sent.
        self._prepared: OrderedDict[bytes, PreparedPicture | PreparedDocument] = OrderedDict()
        self._preparing: dict[bytes, asyncio.Future[Answer]] = {}
        self._cached_bytes = 0

    async def prepare(
        self, source: MediaSource, options: MediaOptions, folder: str, caller: Caller
    ) -> PreparedPicture:
        """One picture or video for the model of a folder; the same one of a tenant only once.

        Raises as `insert_media_tokens`.
        """
        tenant = caller.tenant
        data, digest, version = await asyncio.wrap_future(
            self._fetchers.submit(tenant, lambda: (*_read(source), folder_version(folder)))
        )
        await _charge_fetched(caller, source, data)
        sampling = options.sampling if source.kind == "video" else {}
        size = source.embeds_size
        settled = msgspec.json.encode(
            [source.kind, options.processor, sampling, size], order="sorted"
        )
        scope = f"{tenant}\0{folder}\0{version}\0".encode()
        key = hashlib.sha256(scope + settled + b"\0" + digest).digest()
        request = PrepareRequest(
            folder, data, version, options.processor, source.kind, sampling, size
        )
        answer = await self._prepare_once(key, request, source, caller)
        if not isinstance(answer, PreparedPicture):
            raise InvalidRequest(f"The file isn't {source.kind}.", param=source.param)
        return answer

    async def fetch(self, source: MediaSource, caller: Caller) -> bytes:
        """A source's file as it is. Raises `InvalidRequest`, `Overloaded`."""
        if source.file_id:
            [source] = await run_in_db_thread(_locate_files, caller, [source])
        data, _ = await asyncio.wrap_future(
            self._fetchers.submit(caller.tenant, lambda: _read(source))
        )
        return data

    async def read_document(
        self, source: MediaSource, max_images: int, caller: Caller
    ) -> PreparedDocument:
        """One document; the same one of a tenant only once. `max_images`: as of `read_pdf`.

        Raises as `read_documents`.
        """

        def read() -> tuple[bytes, bytes, str | None]:
            data, digest = _read(source)
            return data, digest, _text_of(data)

        data, digest, text = await asyncio.wrap_future(self._fetchers.submit(caller.tenant, read))
        await _charge_fetched(caller, source, data)
        if text is not None:
            return PreparedDocument([DocumentPage(text)])
        scope = f"{caller.tenant}\0\0document {max_images}\0".encode()
        key = hashlib.sha256(scope + digest).digest()
        request = PrepareDocumentRequest(data, max_images)
        answer = await self._prepare_once(key, request, source, caller)
        if not isinstance(answer, PreparedDocument):
            raise InvalidRequest("The file isn't a document.", param=source.param)
        return answer

    async def _prepare_once(
        self,
        key: bytes,
        request: PrepareRequest | PrepareDocumentRequest,
        source: MediaSource,
        caller: Caller,
    ) -> Answer:
        if (cached := self._prepared.get(key)) is not None:
            self._prepared.move_to_end(key)
            return cached
        if (running := self._preparing.get(key)) is None:
            frame, kind = msgspec.msgpack.encode(request), source.kind
            running = asyncio.ensure_future(
                self._ask(frame, PREPARE_TIMEOUTS_S[kind], kind, caller)
            )
            self._preparing[key] = running
            running.add_done_callback(lambda done: self._finish(key, done))
        # A client that goes away doesn't take the picture from another that waits for it.
        answer = await asyncio.shield(running)
        if isinstance(answer, Refusal):
            if answer.is_model:
                raise EngineUnavailable(answer.message)
            raise InvalidRequest(answer.message, param=answer.param or source.param)
        return answer

    def forget_prepared(self) -> None:
        """Drop what was prepared for requests that may come."""
        self._prepared.clear()
        self._cached_bytes = 0

    async def prepare_sound(
        self,
        data: bytes,
        num_mels: int,
        num_frames: int,
        caller: Caller,
        detection: VoiceDetection | None = None,
    ) -> PreparedSound:
        """The stretches of a file of sound, for a model's encoder.

        Raises:
            InvalidRequest: it can't be read as sound. Overloaded: too many of the tenant's wait.
            RateLimited: over a limit on media; before it is decoded.
        """
        await admit_media(caller, count=1, num_bytes=len(data), param="file")
        request = msgspec.msgpack.encode(PrepareSoundRequest(data, num_mels, num_frames, detection))
        answer = await self._ask(request, SOUND_TIMEOUT_S, "sound", caller)
        if isinstance(answer, PreparedSound):
            return answer
        message = answer.message if isinstance(answer, Refusal) else "The file isn't sound."
        raise InvalidRequest(message, param="file")

    def _finish(self, key: bytes, done: asyncio.Future[Answer]) -> None:
        self._preparing.pop(key, None)
        if done.cancelled() or done.exception() is not None:
            return
        if isinstance(answer := done.result(), PreparedPicture | PreparedDocument):
            self._prepared[key] = answer
            self._cached_bytes += _num_bytes(answer)
            while self._cached_bytes > CACHE_BYTES:
                _, oldest = self._prepared.popitem(last=False)
                self._cached_bytes -= _num_bytes(oldest)

    async def _ask(self, request: bytes, timeout_s: float, kind: str, caller: Caller) -> Answer:
        """Ask a worker and charge the caller the time that it took."""
        loop = asyncio.get_running_loop()

        def ask() -> tuple[Answer, Future[None]]:
            started = time.perf_counter()
            answer = self._ask_worker(request, timeout_s, kind)
            # From here: a client that has gone away is charged, too.
            charge = charge_media(caller, seconds=time.perf_counter() - started)
            return answer, asyncio.run_coroutine_threadsafe(charge, loop)

        answer, charged = await asyncio.wrap_future(self._preparers.submit(caller.tenant, ask))
        await asyncio.shield(asyncio.wrap_future(charged))
        return answer

    def _ask_worker(self, request: bytes, timeout_s: float, kind: str) -> Answer:
        """In one of the threads, each of which has a worker."""
        worker: WorkerProcess | None = getattr(self._worker, "process", None)
        if worker is None or not worker.alive:
            worker = self._worker.process = WorkerProcess(_COMMAND, "media worker", nice=10)
        answer = worker.request(request, timeout_s)
        if answer is None:
            return Refusal(f"The {kind} takes too much time or memory to be read.")
        return ANSWERS.decode(answer)


async def _charge_fetched(caller: Caller, source: MediaSource, data: bytes) -> None:
    """Charge the bytes of a file whose size wasn't known before."""
    if not source.data and source.num_bytes is None:
        await charge_media(caller, num_bytes=len(data))


def _num_bytes(answer: PreparedPicture | PreparedDocument) -> int:
    if isinstance(answer, PreparedPicture):
        return len(answer.tensors)
    # Not their lengths: empty pages would never be evicted, and a character may take four bytes.
    return sum(getsizeof(page.text) + getsizeof(page.image) for page in answer.pages)


def _text_of(data: bytes) -> str | None:
    """A file's text in UTF-8; None where it isn't text, or is a PDF, whose bytes may be ASCII."""
    if data.startswith(b"%PDF-") or b"\0" in data:
        return None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def _read(source: MediaSource) -> tuple[bytes, bytes]:
    """A picture's file and its sha256. Raises `InvalidRequest`."""
    if source.data:
        data = source.data
    elif source.file_id:
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
            "A data: address must be data:TYPE;base64, and then the file.",
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
