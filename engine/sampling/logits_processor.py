"""`LogitsProcessor`: what a package or a program subclasses to change logits, as in vLLM (V1).

One is made for the engine, told which requests stand in which row, and given all rows at once.
"""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.contract.plugins import load_subclass, selected_entry_points
from engine.contract.sampling_params import SamplingParams

State = TypeVar("State")
#: fn(output ids, logits) or fn(prompt ids, output ids, logits), of one request's row.
RequestLogitsProcessor = Callable[..., Tensor]


class MoveDirectionality(Enum):
    """Whether what stood in the other row comes back."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


#: A row that nobody has any more.
RemovedRequest = int
#: Row, parameters, prompt ids (None: the prompt is vectors), and the live list of output ids.
AddedRequest = tuple[int, SamplingParams, list[int] | None, list[int]]
#: From row, to row, and how.
MovedRequest = tuple[int, int, MoveDirectionality]


@dataclass(frozen=True, slots=True)
class BatchUpdate:
    """How the rows changed since the last step.

    Attributes:
        batch_size: rows of this step.
        removed, added, moved: to be followed in this order. A request that is added may take the
            place of another, which isn't among `removed` then.
    """

    batch_size: int
    removed: Sequence[RemovedRequest]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


class LogitsProcessor(ABC):
    """Changes the logits of a step.

    A step's rows are the sequences that get a token by it. One that is left out of a step, or was
    preempted, is added again with its output so far.

    Args:
        vllm_config: the engine's settings by vLLM's names. device: of the logits.
        is_pin_memory: whether host memory should be pinned for copies to it.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise `ValueError` for parameters, `extra_args` above all, that can't be followed: the
        request is refused with its text.
        """
        return

    @abstractmethod
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        raise NotImplementedError

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """The logits changed: float32 [rows, vocab], which may be written to."""
        raise NotImplementedError

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether the likeliest token stays the likeliest: then it sees the logits as they are
        drawn from, after penalties and temperature, and steps without a draw pass it by.
        """
        raise NotImplementedError

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before each `apply`. None: the rows are those of the last step."""
        raise NotImplementedError


class AdapterLogitsProcessor(LogitsProcessor):
    """Gives each request a function of its own, which sees that request's row alone."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, partial[Tensor]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The function for a request with these parameters; None: it has none."""
        raise NotImplementedError

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.req_info, batch_update, self._new_state)

    def apply(self, logits: Tensor) -> Tensor:
        for row, function in self.req_info.items():
            row_logits = logits[row]
            if (changed := function(row_logits)) is not row_logits:
                logits[row] = changed
        return logits

    def _new_state(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> partial[Tensor] | None:
        function = self.new_req_logits_processor(params)
        if function is None:
            return None
        if not takes_prompt(function):
            return partial(function, output_ids)
        if prompt_ids is None:
            raise ValueError("The logits processor reads a prompt's ids, and this prompt has none.")
        return partial(function, prompt_ids, output_ids)


def takes_prompt(function: RequestLogitsProcessor) -> bool:
    """Whether it is fn(prompt ids, output ids, logits) rather than fn(output ids, logits)."""
    try:
        return len(inspect.signature(function).parameters) == 3
    except (TypeError, ValueError):  # built in: no signature to read
        return False


def process_dict_updates(
    req_entries: dict[int, State],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], State | None],
) -> bool:
    """Keep a dict of states by row true to an update; whether anything changed.

    `new_state` makes the state of a request that is added, or None where it has none.
    """
    if batch_update is None:
        return False
    previous_entries = dict(req_entries)
    for row in batch_update.removed:
        req_entries.pop(row, None)
    for row, params, prompt_ids, output_ids in batch_update.added:
        _put(req_entries, row, new_state(params, prompt_ids, output_ids))
    for source, target, direction in batch_update.moved:
        moved, other = req_entries.pop(source, None), req_entries.pop(target, None)
        _put(req_entries, target, moved)
        if direction is MoveDirectionality.SWAP:
            _put(req_entries, source, other)
    return req_entries != previous_entries


def _put(entries: dict[int, State], row: int, state: State | None) -> None:
    if state is None:
        entries.pop(row, None)
    else:
        entries[row] = state


log = logging.getLogger(__name__)
GROUP = "quire.logits_processors"


def processor_classes(
    config: EngineConfig, *, pools: bool, model_classes: Sequence[str] = ()
) -> list[type[LogitsProcessor]]:
    """Those that installed packages name, those of `logits_processors`, then the model's.

    Args:
        pools: the model gives vectors, labels or scores, and chooses no tokens.
        model_classes: module:Class of each that the model's family brings.

    Raises `ConfigError` for what is no such class, and where they can't be used.
    """
    named: Sequence[Any] = config.logits_processors or ()
    points = selected_entry_points(GROUP)
    if not pools and not config.speculative_config:
        brought = [load_subclass(reference, LogitsProcessor) for reference in points]  # type: ignore[type-abstract]
        return [*brought, *map(_class, (*named, *model_classes))]
    why = "a pooling model chooses no tokens" if pools else "speculative_config is set"
    if named:
        raise ConfigError(f"logits_processors can't be used: {why}.", param="logits_processors")
    if points:
        names = ", ".join(point.name for point in points)
        log.warning("Logits processors of packages (%s) aren't used: %s.", names, why)
    return []


def _class(named: Any) -> type[LogitsProcessor]:
    resolved = named
    if isinstance(named, str):
        module, colon, path = named.partition(":")
        if not (module and colon and path):
            raise ConfigError(
                f"logits_processors must be classes or 'module:Class', got {named!r}.",
                param="logits_processors",
            )
        try:
            resolved = import_module(module)
            for part in path.split("."):
                resolved = getattr(resolved, part)
        except Exception as error:  # of a module's own code, whatever it raises
            raise ConfigError(
                f"The logits processor {named} can't be loaded: {type(error).__name__}: {error}",
                param="logits_processors",
            ) from error
    if not (isinstance(resolved, type) and issubclass(resolved, LogitsProcessor)):
        raise ConfigError(
            f"{named!r} is no subclass of engine.LogitsProcessor.", param="logits_processors"
        )
    return resolved
