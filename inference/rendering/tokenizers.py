"""Tokenizers by model folder: loaded once in a thread, with a bounded cache."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from adapters.store import fetch_content
from common.object_storage import has_object_storage
from engine.contract.errors import EngineUnavailable, InvalidRequest, ModelLoadError
from engine.contract.lora import AdapterRef
from engine.text.adapter_tokenizers import AdapterTokenizers
from engine.text.tokenizer import Tokenizer, load_tokenizer
from inference.loop.offload import get_render_pool

logger = logging.getLogger(__name__)

MAX_TOKENIZERS = 16
#: Seconds after which a folder's files are checked again: a model may be replaced under its name.
#: A request in the second half of that time starts the check in the background, so that a busy
#: model's requests don't wait for it.
CHECK_EVERY_S = 10.0
LOAD_TIMEOUT_S = 120.0

#: A folder, and the source of a chat template that overrides the folder's ("": none).
CacheKey = tuple[str, str]
Signature = tuple[tuple[str, int, int], ...]


@dataclass(slots=True)
class _Entry:
    tokenizer: Tokenizer
    signature: Signature
    checked_at: float


class TokenizerCache:
    """The last `MAX_TOKENIZERS` tokenizers. Concurrent callers share one load."""

    def __init__(self) -> None:
        self._entries: OrderedDict[CacheKey, _Entry] = OrderedDict()
        self._loading: dict[CacheKey, asyncio.Task[_Entry]] = {}

    async def get(self, tenant: str, path: str, chat_template: str = "") -> Tokenizer:
        """The tokenizer of a model folder, with an overridden chat template if one is passed.
        It is loaded in the turn of the first tenant that needs it.

        Raises:
            EngineUnavailable: the folder can't be read here (gateways and replicas must share it).
        """
        name = path, chat_template
        entry = self._entries.get(name)
        age = math.inf if entry is None else time.monotonic() - entry.checked_at
        if entry is not None and age < CHECK_EVERY_S:
            self._entries.move_to_end(name)
            if age >= CHECK_EVERY_S / 2:
                self._revalidate(tenant, name, entry)
            return entry.tokenizer
        try:
            return (await asyncio.shield(self._revalidate(tenant, name, entry))).tokenizer
        except ModelLoadError as error:
            raise EngineUnavailable(
                f"The model's tokenizer can't be read: {error.message}"
            ) from error

    def _revalidate(
        self, tenant: str, name: CacheKey, cached: _Entry | None
    ) -> asyncio.Task[_Entry]:
        """The running check of the folder, or a new one."""
        loop = asyncio.get_running_loop()
        task = self._loading.get(name)
        if task is None or task.done() or task.get_loop() is not loop:
            task = self._loading[name] = loop.create_task(self._load(tenant, name, cached))
            task.add_done_callback(partial(self._revalidated, name))
        return task

    def _revalidated(self, name: CacheKey, task: asyncio.Task[_Entry]) -> None:
        if self._loading.get(name) is task:
            del self._loading[name]
        if not task.cancelled():
            task.exception()  # marks it as retrieved: a request that needs it reports a new error

    async def _load(self, tenant: str, name: CacheKey, cached: _Entry | None) -> _Entry:
        pool = get_render_pool()
        entry = await pool.run_in_thread(tenant, LOAD_TIMEOUT_S, _load, *name, cached)
        self._entries[name] = entry
        self._entries.move_to_end(name)
        while len(self._entries) > MAX_TOKENIZERS:
            self._entries.popitem(last=False)
        return entry


def _load(path: str, chat_template: str, cached: _Entry | None) -> _Entry:
    signature = _signature(path)
    if cached is not None and cached.signature == signature:
        cached.checked_at = time.monotonic()
        return cached
    tokenizer = load_tokenizer(path)
    if chat_template:
        tokenizer = tokenizer.with_chat_template(chat_template)
    _ = tokenizer.vocab_size, tokenizer.byte_rules  # computed here, not on the event loop
    return _Entry(tokenizer, signature, time.monotonic())


def _signature(path: str) -> Signature:
    """Names, sizes and modification times of the folder's small files."""
    files = sorted(Path(path).glob("*.json")) + sorted(Path(path).glob("*.jinja"))
    stats = [(file.name, file.stat()) for file in files]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


tokenizers = TokenizerCache()


class AdapterTokenizerCache:
    """Tokenizers of adapters. Concurrent callers share one load."""

    def __init__(self) -> None:
        self._tokenizers = AdapterTokenizers()
        self._loading: dict[tuple[str, int], asyncio.Task[Tokenizer]] = {}

    async def get(self, tenant: str, adapter: AdapterRef | None, base: Tokenizer) -> Tokenizer:
        """The adapter's own tokenizer, or `base`, the model's, if it has none.

        Raises `EngineUnavailable` if its files can't be read here (gateways and replicas must share
        them).
        """
        tokenizer = self._tokenizers.get_cached(adapter, base)
        if tokenizer is not None or adapter is None:
            return tokenizer or base
        key, loop = (adapter.tokenizer, id(base)), asyncio.get_running_loop()
        task = self._loading.get(key)
        if task is None or task.done() or task.get_loop() is not loop:
            task = self._loading[key] = loop.create_task(self._load(tenant, adapter, base))
        try:
            return await asyncio.shield(task)
        except (InvalidRequest, OSError) as error:
            logger.error("%s", error)
            raise EngineUnavailable("The adapter's tokenizer can't be read.") from error
        finally:
            if task.done() and self._loading.get(key) is task:
                del self._loading[key]

    async def _load(self, tenant: str, adapter: AdapterRef, base: Tokenizer) -> Tokenizer:
        pool = get_render_pool()
        return await pool.run_in_thread(tenant, LOAD_TIMEOUT_S, self._read, adapter, base)

    def _read(self, adapter: AdapterRef, base: Tokenizer) -> Tokenizer:
        if has_object_storage():
            adapter = msgspec.structs.replace(adapter, path=str(fetch_content(adapter.digest)))
        tokenizer = self._tokenizers.get(adapter, base)
        _ = tokenizer.vocab_size, tokenizer.byte_rules  # computed here, not on the event loop
        return tokenizer


adapter_tokenizers = AdapterTokenizerCache()
