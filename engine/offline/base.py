"""What the methods of `LLM` have in common."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

from tqdm import tqdm

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import InvalidRequest, QuireError
from engine.core.engine_core import EngineCore
from engine.offline.llm_engine import LLMEngine, TorchThreads

log = logging.getLogger(__name__)

#: Whether to show a progress bar, or a function that creates one, with tqdm's arguments.
UseTqdm = bool | Callable[..., Any]


T = TypeVar("T")


def per_prompt(name: str, value: T | Sequence[T], kind: type[T], count: int) -> list[T]:
    """Return the argument `name` of each prompt, given one for all or a list of them.

    Raises `InvalidRequest` for a list of another length.
    """
    if isinstance(value, kind):
        return [value] * count
    values = list(cast(Sequence[T], value))
    if len(values) != count:
        raise InvalidRequest(f"{count} prompts need as many {name}, got {len(values)}.", param=name)
    return values


def progress(use_tqdm: UseTqdm, total: int) -> Any:
    """Return a progress bar for `total` requests, which is a context manager."""
    make = use_tqdm if callable(use_tqdm) else tqdm
    return make(total=total, desc="Processed prompts", disable=not use_tqdm)


class Result(Protocol):
    """The result of a request. `error` is None if it succeeded."""

    @property
    def error(self) -> QuireError | None: ...


def check_failures(results: Sequence[Result]) -> None:
    """Raise the first error if all requests failed, so that no result is lost. Otherwise log
    failures as a warning.
    """
    errors = [result.error for result in results if result.error is not None]
    if not errors:
        return
    if len(errors) == len(results):
        raise errors[0]
    log.warning("%d of %d requests failed, the first: %s", len(errors), len(results), errors[0])


class LLMBase:
    """An engine in this process, and the numbering of its requests.

    Attributes:
        llm_engine: the engine, for callers that run single steps.
        config, core: those of the engine.
    """

    llm_engine: LLMEngine
    config: EngineConfig
    core: EngineCore
    _threads: TorchThreads
    _ids: itertools.count[int]

    def _use(self, engine: LLMEngine) -> None:
        self.llm_engine = engine
        self.config, self.core, self._threads = engine.config, engine.core, engine.threads
        self._ids = itertools.count()
