"""Tokenizers by model folder: loaded once in a thread, a bounded number kept."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from engine.contract.errors import EngineUnavailable, ModelLoadError
from engine.text import Tokenizer, load_tokenizer
from inference.rendering.pool import render_pool

KEPT = 16
#: A folder's files are looked at again after so long: a model may be replaced under its name.
CHECK_EVERY_S = 10.0
LOAD_TIMEOUT_S = 120.0

#: A folder, and the source of a chat template in the place of the folder's ("": none).
Name = tuple[str, str]
Signature = tuple[tuple[str, int, int], ...]


@dataclass(slots=True)
class _Entry:
    tokenizer: Tokenizer
    signature: Signature
    checked_at: float


class TokenizerCache:
    """The last `KEPT` tokenizers. Callers who miss at the same moment share one load."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Name, _Entry] = OrderedDict()
        self._loading: dict[Name, asyncio.Task[_Entry]] = {}

    async def get(self, path: str, chat_template: str = "") -> Tokenizer:
        """The tokenizer of a model folder, perhaps with another chat template than the folder's.

        Raises:
            EngineUnavailable: the folder can't be read here (gateways and replicas must share it).
        """
        name = path, chat_template
        entry = self._entries.get(name)
        if entry is not None and time.monotonic() - entry.checked_at < CHECK_EVERY_S:
            self._entries.move_to_end(name)
            return entry.tokenizer
        loop = asyncio.get_running_loop()
        task = self._loading.get(name)
        if task is None or task.done() or task.get_loop() is not loop:
            task = self._loading[name] = loop.create_task(self._load(name, entry))
        try:
            return (await asyncio.shield(task)).tokenizer
        except ModelLoadError as error:
            raise EngineUnavailable(
                f"The model's tokenizer can't be read: {error.message}"
            ) from error
        finally:
            if task.done() and self._loading.get(name) is task:
                del self._loading[name]

    async def _load(self, name: Name, known: _Entry | None) -> _Entry:
        fresh = await render_pool().run_in_thread(LOAD_TIMEOUT_S, _load, *name, known)
        self._entries[name] = fresh
        self._entries.move_to_end(name)
        while len(self._entries) > KEPT:
            self._entries.popitem(last=False)
        return fresh


def _load(path: str, chat_template: str, known: _Entry | None) -> _Entry:
    signature = _signature(path)
    if known is not None and known.signature == signature:
        known.checked_at = time.monotonic()
        return known
    tokenizer = load_tokenizer(path)
    if chat_template:
        tokenizer = tokenizer.with_chat_template(chat_template)
    _ = tokenizer.vocab_size, tokenizer.byte_rules  # computed here, not on the event loop
    return _Entry(tokenizer, signature, time.monotonic())


def _signature(path: str) -> Signature:
    """Names, sizes and times of the folder's small files."""
    files = sorted(Path(path).glob("*.json")) + sorted(Path(path).glob("*.jinja"))
    stats = [(file.name, file.stat()) for file in files]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


tokenizers = TokenizerCache()
