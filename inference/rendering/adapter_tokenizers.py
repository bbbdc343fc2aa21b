"""Tokenizers that adapters bring: each content read once, in a thread, a bounded number kept."""

from __future__ import annotations

import asyncio
import logging

from engine.contract.adapters import AdapterRef
from engine.contract.errors import EngineUnavailable, InvalidRequest
from engine.text import Tokenizer
from engine.text.adapter_tokenizers import AdapterTokenizers
from inference.rendering.pool import render_pool
from inference.rendering.tokenizers import LOAD_TIMEOUT_S

logger = logging.getLogger(__name__)


class OwnTokenizers:
    """The adapters' own. Callers who miss at the same moment share one load."""

    def __init__(self) -> None:
        self._kept = AdapterTokenizers()
        self._loading: dict[tuple[str, int], asyncio.Task[Tokenizer]] = {}

    async def of(self, adapter: AdapterRef | None, base: Tokenizer) -> Tokenizer:
        """By what an adapter's prompts and texts are: its own tokenizer, else the model's, `base`.

        Raises `EngineUnavailable`: its files can't be read here (gateways and replicas must share
        them).
        """
        found = self._kept.known(adapter, base)
        if found is not None or adapter is None:
            return found or base
        key, loop = (adapter.tokenizer, id(base)), asyncio.get_running_loop()
        task = self._loading.get(key)
        if task is None or task.done() or task.get_loop() is not loop:
            task = self._loading[key] = loop.create_task(self._load(adapter, base))
        try:
            return await asyncio.shield(task)
        except InvalidRequest as error:
            logger.error("%s", error.message)
            raise EngineUnavailable("The adapter's tokenizer can't be read.") from error
        finally:
            if task.done() and self._loading.get(key) is task:
                del self._loading[key]

    async def _load(self, adapter: AdapterRef, base: Tokenizer) -> Tokenizer:
        return await render_pool().run_in_thread(LOAD_TIMEOUT_S, self._read, adapter, base)

    def _read(self, adapter: AdapterRef, base: Tokenizer) -> Tokenizer:
        found = self._kept.of(adapter, base)
        _ = found.vocab_size, found.byte_rules  # computed here, not on the event loop
        return found


own_tokenizers = OwnTokenizers()
