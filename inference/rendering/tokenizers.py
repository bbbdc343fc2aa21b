"""Tokenizers by model folder: loaded once in a thread, a bounded number kept."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from engine.errors import EngineUnavailable, ModelLoadError
from engine.text import Tokenizer, load_tokenizer
from inference.rendering.pool import render_pool

KEPT = 16
#: A folder's files are looked at again after so long: a model may be replaced under its name.
CHECK_EVERY_S = 10.0
LOAD_TIMEOUT_S = 120.0

Signature = tuple[tuple[str, int, int], ...]


@dataclass(slots=True)
class _Entry:
    tokenizer: Tokenizer
    signature: Signature
    checked_at: float


class TokenizerCache:
    """The last `KEPT` tokenizers. Callers who miss at the same moment share one load."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._loading: dict[str, asyncio.Task[_Entry]] = {}

    async def get(self, path: str) -> Tokenizer:
        """The tokenizer of a model folder.

        Raises:
            EngineUnavailable: the folder can't be read here (gateways and replicas must share it).
        """
        entry = self._entries.get(path)
        if entry is not None and time.monotonic() - entry.checked_at < CHECK_EVERY_S:
            self._entries.move_to_end(path)
            return entry.tokenizer
        loop = asyncio.get_running_loop()
        task = self._loading.get(path)
        if task is None or task.done() or task.get_loop() is not loop:
            task = self._loading[path] = loop.create_task(self._load(path, entry))
        try:
            return (await asyncio.shield(task)).tokenizer
        except ModelLoadError as error:
            raise EngineUnavailable(
                f"The model's tokenizer can't be read: {error.message}"
            ) from error
        finally:
            if task.done() and self._loading.get(path) is task:
                del self._loading[path]

    async def _load(self, path: str, known: _Entry | None) -> _Entry:
        fresh = await render_pool().run_in_thread(LOAD_TIMEOUT_S, _load, path, known)
        self._entries[path] = fresh
        self._entries.move_to_end(path)
        while len(self._entries) > KEPT:
            self._entries.popitem(last=False)
        return fresh


def _load(path: str, known: _Entry | None) -> _Entry:
    signature = _signature(path)
    if known is not None and known.signature == signature:
        known.checked_at = time.monotonic()
        return known
    tokenizer = load_tokenizer(path)
    _ = tokenizer.vocab_size, tokenizer.byte_rules  # computed here, not on the event loop
    return _Entry(tokenizer, signature, time.monotonic())


def _signature(path: str) -> Signature:
    """Names, sizes and times of the folder's small files."""
    files = sorted(Path(path).glob("*.json")) + sorted(Path(path).glob("*.jinja"))
    stats = [(file.name, file.stat()) for file in files]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


tokenizers = TokenizerCache()
