"""`MediaPool`: fetches media, and decodes them in separate processes."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache
from sys import getsizeof
from typing import Any, TypeVar

import msgspec
from django.conf import settings

from engine.contract.errors import EngineUnavailable, InvalidRequest
from engine.contract.messages import ModelInfo
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
    split_sampling,
)
from engine.system.worker_process import WorkerProcess
from inference.errors import Overloaded
from inference.loop.offload import FairThreadPool
from inference.rendering.media_files import read_source
from inference.rendering.media_sources import MediaSource, admit_sources
from inference.schemas.chat import ChatRequest
from metering.media import admit_media, charge_media
from tenants.authentication import Caller

#: A file, and what else was read with it.
R = TypeVar("R", bound=tuple[Any, ...])

#: Number of processes that decode media.
NUM_WORKERS = 2
#: Maximum number of a request's media that are fetched or wait for a worker at a time. Requests
#: with many hold so many files in memory, and leave room for others of their tenant.
REQUEST_CONCURRENCY = 4
#: Maximum number of a tenant's media per worker that wait: those of 80 requests.
TENANT_PER_WORKER = 160
#: Maximum bytes of these: a small request may name large files by their addresses.
TENANT_WAITING_BYTES = 512 << 20
#: Seconds of processor time for one image, video or document, after which its process is killed.
PREPARE_TIMEOUTS_S = {"image": 20.0, "audio": 20.0, "video": 60.0, "document": 60.0}
#: The same for an audio file, which may be hours long.
SOUND_TIMEOUT_S = 120.0
#: The limit by the clock is so many times as much: a file waits where engines, which go first, keep
#: the processors busy.
CLOCK_FACTOR = 5
#: Seconds by the clock for a worker to start.
START_TIMEOUT_S = 120.0

_COMMAND = "engine.multimodal.worker"


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """How a request's media are decoded.

    Attributes:
        processor: mm_processor_kwargs.
        sampling: of video frames, see `read_video`.
        pruning_rates: see `MediaProcessor`.
    """

    processor: dict[str, Any]
    sampling: dict[str, Any]
    pruning_rates: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_chat(cls, chat: ChatRequest, info: ModelInfo) -> MediaOptions:
        """Options of a chat. As in vLLM, mm_processor_kwargs may include "fps" and "num_frames".
        Raises `InvalidRequest` for a model without media input.
        """
        for name in ("mm_processor_kwargs", "media_io_kwargs"):
            if getattr(chat, name) and not (info.sees or info.max_audios):
                raise InvalidRequest(f"The model {info.name} takes no images.", param=name)
        processor, sampling = split_sampling(
            info.mm_processor_kwargs | (chat.mm_processor_kwargs or {})
        )
        sampling |= (chat.media_io_kwargs or {}).get("video", {})
        default = info.media_io_kwargs.get("video", {})
        return cls(processor, sampling or default, info.pruning_rates)


class MediaPool:
    """Fetches and decodes media off the event loop, shared fairly between tenants."""

    def __init__(self) -> None:
        num_fetchers = settings.QUIRE.media_fetch_threads
        self._fetchers = FairThreadPool(num_fetchers, "quire-fetch", "images")
        self._preparers = FairThreadPool(NUM_WORKERS, "quire-media", "images", TENANT_PER_WORKER)
        self._worker = threading.local()
        self._waiting_bytes: Counter[str] = Counter()
        #: Least recently used first. Keyed by tenant and cache namespace: response times must not
        #: reveal what other tenants have sent, nor an erased one of the same name.
        self._prepared: OrderedDict[bytes, PreparedPicture | PreparedDocument] = OrderedDict()
        self._preparing: dict[bytes, asyncio.Future[Answer]] = {}
        self._cached_bytes = 0

    async def prepare_all(
        self, sources: Sequence[MediaSource], options: MediaOptions, folder: str, caller: Caller
    ) -> list[PreparedPicture]:
        """Decode a request's images and videos, but those that still wait when one has failed.

        Raises as `insert_media_tokens`.
        """
        turns = asyncio.Semaphore(REQUEST_CONCURRENCY)

        async def prepare(source: MediaSource) -> PreparedPicture:
            async with turns:
                return await self.prepare(source, options, folder, caller)

        tasks = [asyncio.ensure_future(prepare(source)) for source in sources]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def prepare(
        self, source: MediaSource, options: MediaOptions, folder: str, caller: Caller
    ) -> PreparedPicture:
        """Decode one image or video for a model's folder; cached per tenant.

        Raises as `insert_media_tokens`.
        """

        def read() -> tuple[bytes, bytes, str]:
            return *read_source(source), folder_version(folder)

        data, digest, version = await self._read(source, caller, read)
        sampling = options.sampling if source.kind == "video" else {}
        size, rates = source.embeds_size, options.pruning_rates
        settled = msgspec.json.encode(
            [source.kind, options.processor, sampling, size, rates, source.grid], order="sorted"
        )
        scope = f"{_cache_owner(caller)}\0{folder}\0{version}\0".encode()
        key = hashlib.sha256(scope + settled + b"\0" + digest).digest()
        request = PrepareRequest(
            folder=folder,
            data=data,
            version=version,
            options=options.processor,
            kind=source.kind,
            sampling=sampling,
            embeds_size=size,
            pruning_rates=rates,
            grid=source.grid,
        )
        answer = await self._prepare_once(key, request, source, caller)
        if not isinstance(answer, PreparedPicture):
            raise InvalidRequest(f"The file isn't {source.kind}.", param=source.param)
        return answer

    async def fetch(self, source: MediaSource, caller: Caller) -> bytes:
        """Fetch the file of a source that `admit_sources` returned, of at most the size of an
        upload. Raises `InvalidRequest`, `Overloaded`.
        """
        max_bytes = settings.QUIRE.max_file_bytes
        data, _ = await self._read(source, caller, lambda: read_source(source, max_bytes))
        return data

    async def _read(self, source: MediaSource, caller: Caller, read: Callable[[], R]) -> R:
        """Run `read` in a thread, and charge the caller for the file: for one that is being fetched
        even if its request has ended meanwhile.
        """
        fetched = self._fetchers.submit(caller.tenant, read)

        async def charge() -> R:
            result = await asyncio.wrap_future(fetched)
            await _charge_fetched(caller, source, result[0])
            return result

        try:
            return await asyncio.shield(charge())
        except asyncio.CancelledError:
            fetched.cancel()  # one that hasn't begun
            raise

    async def read_document(
        self, source: MediaSource, max_images: int, caller: Caller
    ) -> PreparedDocument:
        """Read one document; cached per tenant. `max_images`: as for `read_pdf`.

        Raises as `read_documents`.
        """

        def read() -> tuple[bytes, bytes, str | None]:
            data, digest = read_source(source)
            return data, digest, _text_of(data)

        data, digest, text = await self._read(source, caller, read)
        if text is not None:
            return PreparedDocument([DocumentPage(text)])
        scope = f"{_cache_owner(caller)}\0\0document {max_images}\0".encode()
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
        # A client that disconnects must not cancel the work for others that wait for it.
        answer = await asyncio.shield(running)
        if isinstance(answer, Refusal):
            if answer.is_model:
                raise EngineUnavailable(answer.message)
            raise InvalidRequest(answer.message, param=answer.param or source.param)
        return answer

    def forget_prepared(self) -> None:
        """Drop the cache of decoded media."""
        self._prepared.clear()
        self._cached_bytes = 0

    async def prepare_sound(
        self,
        source: bytes | MediaSource,
        num_mels: int,
        num_frames: int,
        caller: Caller,
        detection: VoiceDetection | None = None,
    ) -> PreparedSound:
        """Split an audio file, or the file at a source, into segments for a model's encoder.

        Raises:
            InvalidRequest: the audio can't be fetched or decoded. Overloaded: too many of the
                tenant's wait. RateLimited: over a limit on media, before fetching and decoding.
        """
        if isinstance(source, bytes):
            data, param = source, "file"
            await admit_media(caller, count=1, num_bytes=len(data), param=param)
        else:
            [located] = await admit_sources([source], caller)
            data, param = await self.fetch(located, caller), source.param
        request = msgspec.msgpack.encode(PrepareSoundRequest(data, num_mels, num_frames, detection))
        answer = await self._ask(request, SOUND_TIMEOUT_S, "sound", caller)
        if isinstance(answer, PreparedSound):
            return answer
        message = answer.message if isinstance(answer, Refusal) else "The file isn't sound."
        raise InvalidRequest(message, param=param)

    def _finish(self, key: bytes, done: asyncio.Future[Answer]) -> None:
        self._preparing.pop(key, None)
        if done.cancelled() or done.exception() is not None:
            return
        if isinstance(answer := done.result(), PreparedPicture | PreparedDocument):
            self._prepared[key] = answer
            self._cached_bytes += _num_bytes(answer)
            while self._cached_bytes > settings.QUIRE.media_cache_bytes:
                _, oldest = self._prepared.popitem(last=False)
                self._cached_bytes -= _num_bytes(oldest)

    async def _ask(self, request: bytes, timeout_s: float, kind: str, caller: Caller) -> Answer:
        """Send a request to a worker and charge the caller for its time."""
        loop, waiting, tenant = asyncio.get_running_loop(), self._waiting_bytes, caller.tenant
        size, frame = len(request), [request]
        # One file alone may have more, where operators accept files of that size.
        if waiting[tenant] and waiting[tenant] + size > TENANT_WAITING_BYTES:
            raise Overloaded("Too many bytes of files wait. Try again in a moment.")

        def ask() -> tuple[Answer, Future[None]]:
            answer, seconds = self._ask_worker(frame.pop(), timeout_s, kind)
            # In this thread, so that clients that have disconnected are charged too.
            charge = charge_media(caller, seconds=seconds)
            return answer, asyncio.run_coroutine_threadsafe(charge, loop)

        waiting[tenant] += size
        try:
            answer, charged = await asyncio.wrap_future(self._preparers.submit(tenant, ask))
        finally:
            waiting[tenant] -= size
            frame.clear()  # a cancelled job stays in its queue until its turn
        await asyncio.shield(asyncio.wrap_future(charged))
        return answer

    def _ask_worker(self, request: bytes, timeout_s: float, kind: str) -> tuple[Answer, float]:
        """Send a request to this thread's worker; each thread has one. Returns its answer, and the
        seconds of processor time that it took: neither the worker's start, as another tenant's file
        may have ended the one before, nor waits. Raises `EngineUnavailable` if none starts.
        """
        worker: WorkerProcess | None = getattr(self._worker, "process", None)
        if worker is None or not worker.alive:
            worker = self._worker.process = _start_worker()
        answer = worker.request(request, CLOCK_FACTOR * timeout_s, timeout_s)
        if answer is None:
            refusal = Refusal(f"The {kind} takes too much time or memory to be read.")
            return refusal, worker.processor_s
        return ANSWERS.decode(answer), worker.processor_s


def _start_worker() -> WorkerProcess:
    """Return one that takes files: its start isn't in the time of the first. Raises
    `EngineUnavailable`.
    """
    message = "The process that reads media didn't start."
    try:
        worker = WorkerProcess(_COMMAND, "media worker", nice=19)
    except OSError as error:
        raise EngineUnavailable(message) from error
    if worker.request(b"", START_TIMEOUT_S) is None:
        raise EngineUnavailable(message)
    return worker


async def _charge_fetched(caller: Caller, source: MediaSource, data: bytes) -> None:
    """Charge for a fetched file whose size wasn't known before."""
    if not source.data and source.num_bytes is None:
        await charge_media(caller, num_bytes=len(data))


def _cache_owner(caller: Caller) -> str:
    """What caches a caller's media: neither another tenant nor one that was erased."""
    return f"{caller.tenant_id}\0{caller.cache_namespace}"


def _num_bytes(answer: PreparedPicture | PreparedDocument) -> int:
    if isinstance(answer, PreparedPicture):
        return len(answer.tensors)
    # Not their lengths: empty pages would never be evicted, and a character may take four bytes.
    return sum(getsizeof(page.text) + getsizeof(page.image) for page in answer.pages)


def _text_of(data: bytes) -> str | None:
    """A file's text in UTF-8; None if it isn't text, or is a PDF, whose bytes may be ASCII."""
    if data.startswith(b"%PDF-") or b"\0" in data:
        return None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


@lru_cache(maxsize=1)
def get_media_pool() -> MediaPool:
    """This process's pool."""
    return MediaPool()
