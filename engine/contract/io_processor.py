"""`IOProcessor`: a package's own input and output of a pooling model. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint
from typing import Any, Generic, TypeVar

import numpy

from engine.contract.errors import ConfigError
from engine.contract.plugins import loaded, wanted
from engine.contract.pooling_params import PoolingParams

GROUP = "quire.io_processors"
Input = TypeVar("Input")
Output = TypeVar("Output")
#: A text, token ids, or a dict with one of `prompt` and `prompt_token_ids`.
IOPrompt = str | list[int] | dict[str, Any]


@dataclass(frozen=True, slots=True)
class PooledData:
    """`data`: float32 [size], or [num_tokens, size] of a task by token."""

    data: numpy.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """What the model made of one prompt."""

    prompt_token_ids: list[int]
    outputs: PooledData


class IOProcessor(ABC, Generic[Input, Output]):
    """Turns a caller's data into prompts, and what the model makes of them into an answer.

    One is made in each process that needs it, and called in several threads at once. `ValueError`
    of `parse_data` and `pre_process` is the caller's mistake and becomes 400, with its text.

    Args:
        model: the served model's name.
    """

    def __init__(self, model: str) -> None:
        self.model = model

    @abstractmethod
    def parse_data(self, data: Any) -> Input:
        """Check what the caller sent as `data`, JSON as Python has it. Raises ValueError."""

    @abstractmethod
    def pre_process(self, prompt: Input, request_id: str | None = None) -> Sequence[IOPrompt]:
        """The prompts that the model is to pool; at least one."""

    def merge_pooling_params(self, params: PoolingParams | None = None) -> PoolingParams:
        """What to do with the prompts; `params` is what the caller asked for."""
        return params or PoolingParams()

    @abstractmethod
    def post_process(
        self, model_output: Sequence[PooledPrompt], request_id: str | None = None
    ) -> Output:
        """The answer, from one output a prompt in their order; over HTTP it must be JSON."""


def named_point(name: str) -> EntryPoint:
    """The entry point of the processor with this name. Raises `ConfigError` where there's none."""
    points = {point.name: point for point in wanted(GROUP)}
    if name not in points:
        known = f"There are: {', '.join(sorted(points))}" if points else "None is installed"
        raise ConfigError(
            f"There is no IO processor {name[:100]!r} here. {known}.", param="io_processor_plugin"
        )
    return points[name]


@lru_cache(maxsize=64)
def io_processor(name: str, model: str) -> IOProcessor[Any, Any]:
    """The processor that an installed package brings under this name.

    Raises `ConfigError` where there is none, and for one that can't be made.
    """
    kind = loaded(named_point(name), IOProcessor)  # type: ignore[type-abstract]
    try:
        return kind(model)
    except Exception as error:
        raise ConfigError(
            f"The IO processor {name} can't be made: {error}", param="io_processor_plugin"
        ) from error
