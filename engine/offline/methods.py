"""`OfflineMethods`: what the parts that `LLM` is made of share."""

from __future__ import annotations

import itertools

from engine.contract.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.offline.llm_engine import LLMEngine
from engine.offline.threads import TorchThreads


class OfflineMethods:
    """An engine in this process, and how its requests are numbered.

    Attributes:
        llm_engine: what does the work, for those who want each step.
        config, core: its own.
    """

    llm_engine: LLMEngine
    config: EngineConfig
    core: EngineCore
    _threads: TorchThreads
    _ids: itertools.count[int]

    def _use(self, engine: LLMEngine) -> None:
        """Work with `engine` from now on."""
        self.llm_engine = engine
        self.config, self.core, self._threads = engine.config, engine.core, engine.threads
        self._ids = itertools.count()
