"""`LogitsProcessor`: base class for plug-ins that modify logits, as in vLLM (V1).

The engine creates one instance, which is notified of changes of the rows and receives all rows of a
step at once.
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
    """Direction of a move: one way, or a swap of two rows."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


#: A row that no request occupies any more.
RemovedRequest = int
#: Row, parameters, prompt ids (None: the prompt is embeddings), and the live list of output ids.
AddedRequest = tuple[int, SamplingParams, list[int] | None, list[int]]
#: Source row, target row, and direction.
MovedRequest = tuple[int, int, MoveDirectionality]


@dataclass(frozen=True, slots=True)
class BatchUpdate:
    """Changes of the rows since the last step.

    Attributes:
        batch_size: number of rows of this step.
        removed, added, moved: to be applied in this order. An added request may replace another
            one in its row, which isn't among `removed` then.
    """

    batch_size: int
    removed: Sequence[RemovedRequest]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


class LogitsProcessor(ABC):
    """Modifies the logits of a step.

    A step's rows are the sequences that get a token in it. A sequence that was left out of a step,
    or preempted, is added again with its output so far.

    Args:
        vllm_config: the engine's settings by vLLM's names. device: device of the logits.
        is_pin_memory: whether to pin host memory for copies to the device.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise `ValueError` for unsupported parameters, `extra_args` in particular: the request is
        rejected with its message.
        """
        return

    @abstractmethod
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        raise NotImplementedError

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """Return modified logits, float32 [rows, vocab]; they may be modified in place."""
        raise NotImplementedError

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether the argmax never changes. If so, it receives the logits after penalties and
        temperature, and is skipped in steps that sample nothing.
        """
        raise NotImplementedError

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before each `apply`. None: the rows are unchanged."""
        raise NotImplementedError


class AdapterLogitsProcessor(LogitsProcessor):
    """Gives each request a separate function, which receives that request's row only."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, partial[Tensor]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """Return the function for a request with these parameters; None: it has none."""
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
    except (TypeError, ValueError):  # a built-in without a signature
        return False


def process_dict_updates(
    req_entries: dict[int, State],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], State | None],
) -> bool:
    """Apply an update to a dict of states by row; return whether anything changed.

    `new_state` creates the state of an added request, or returns None if it has none.
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
    """Return those of installed packages, those of `logits_processors`, then the model's, which
    alone are used with drafts.

    Args:
        pools: whether the model returns embeddings, labels or scores instead of tokens.
        model_classes: module:Class of the processors that the model's family defines.

    Raises `ConfigError` for invalid classes, and for models that don't support them.
    """
    named: Sequence[Any] = config.logits_processors or ()
    points = selected_entry_points(GROUP)
    of_model = [] if pools else [_class(name) for name in model_classes]
    if not pools and not config.speculative_config:
        brought = [load_subclass(reference, LogitsProcessor) for reference in points]  # type: ignore[type-abstract]
        return [*brought, *map(_class, named), *of_model]
    why = "a pooling model chooses no tokens" if pools else "speculative_config is set"
    if named:
        raise ConfigError(f"logits_processors can't be used: {why}.", param="logits_processors")
    if points:
        names = ", ".join(point.name for point in points)
        log.warning("Logits processors of packages (%s) aren't used: %s.", names, why)
    return of_model


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
        except Exception as error:  # from the module's code
            raise ConfigError(
                f"The logits processor {named} can't be loaded: {type(error).__name__}: {error}",
                param="logits_processors",
            ) from error
    if not (isinstance(resolved, type) and issubclass(resolved, LogitsProcessor)):
        raise ConfigError(
            f"{named!r} is no subclass of engine.LogitsProcessor.", param="logits_processors"
        )
    return resolved
