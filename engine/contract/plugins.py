"""Entry points of installed packages that plug into Quire. Torch-free; imports none of them.

QUIRE_PLUGINS, where it is set, names those that are wanted, with commas between; "" means none.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

import numpy

from engine.contract.errors import ConfigError
from engine.contract.lora import LoRARequest
from engine.contract.pooling_params import PoolingParams

Kind = TypeVar("Kind")
DEVICES = "quire.devices"
_BUILT_IN_DEVICES = ("auto", "cpu", "cuda")


def is_wanted(name: str) -> bool:
    """Whether QUIRE_PLUGINS, where it is set, has this name."""
    names = os.environ.get("QUIRE_PLUGINS")
    return names is None or name in {each.strip() for each in names.split(",")}


def selected_entry_points(group: str) -> list[EntryPoint]:
    """The group's entry points, but for those that QUIRE_PLUGINS leaves out."""
    return [point for point in _installed(group, tuple(sys.path)) if is_wanted(point.name)]


@cache
def _installed(group: str, folders: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Of the packages in these folders: to look through all of them takes longer than all else
    that a small model's start does.
    """
    return tuple(entry_points(group=group))


def load_subclass(point: EntryPoint, base: type[Kind]) -> type[Kind]:
    """The subclass of `base` that an entry point names.

    As in vLLM it may also name a function that returns the class, or its "package.module.Class".

    Raises `ConfigError` for one that can't be imported or is something else.
    """
    return checked_class(point, resolve_entry_point(point), base)


def resolve_entry_point(point: EntryPoint) -> object:
    """What an entry point names; of a function, what it returns; of a dotted path, what's there.

    Raises `ConfigError` for one that can't be imported or fails.
    """
    try:
        found = point.load()
        if not isinstance(found, type) and callable(found):
            found = found()
        if isinstance(found, str):
            module, _, name = found.rpartition(".")
            found = getattr(import_module(module), name)
        return found
    except Exception as error:
        raise ConfigError(
            f"The plugin {point.name} ({point.value}) can't be loaded: {error}",
            param="QUIRE_PLUGINS",
        ) from error


def checked_class(point: EntryPoint, found: object, base: type[Kind]) -> type[Kind]:
    """The same, known to be a subclass of `base`. Raises `ConfigError`."""
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(
            f"The plugin {point.name} ({point.value}) is no subclass of "
            f"{base.__module__}.{base.__qualname__}.",
            param="QUIRE_PLUGINS",
        )
    return found


def check_device(name: str) -> None:
    """Raise `ConfigError` for the name of no device, built-in or installed."""
    if name in _BUILT_IN_DEVICES:
        return
    installed = sorted(point.name for point in selected_entry_points(DEVICES))
    if name not in installed:
        known = ", ".join([*_BUILT_IN_DEVICES, *installed])
        raise ConfigError(f"device must be one of {known}; got {name!r}.", param="device")


# -- `IOProcessor`: a package's own input and output of a pooling model. Torch-free.


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


def io_processor_entry_point(name: str) -> EntryPoint:
    """The entry point of the processor with this name. Raises `ConfigError` where there's none."""
    points = {point.name: point for point in selected_entry_points(GROUP)}
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
    kind = load_subclass(io_processor_entry_point(name), IOProcessor)  # type: ignore[type-abstract]
    try:
        return kind(model)
    except Exception as error:
        raise ConfigError(
            f"The IO processor {name} can't be made: {error}", param="io_processor_plugin"
        ) from error


# -- `LoRAResolver`: what a package subclasses to find adapters by name. Torch-free.


LORA_RESOLVER_GROUP = "quire.lora_resolvers"


class LoRAResolver(ABC):
    """Finds the files of an adapter that a request names and nobody has loaded.

    One is made in each gateway and worker, and called in its event loop: hand slow work to a
    thread. A method that raises is told in the log, and its caller is asked to try again.
    """

    @abstractmethod
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """The adapter, or None where there is none.

        The answer is the same whoever asks: a resolver learns no tenant.

        Args:
            base_model_name: what the model was loaded from, a folder or a hub id; also the name
                that it's served by, where that is another.
            lora_name: as the client sent it, without the model's name.
        """


class LoRAResolverRegistry:
    """Where a function that an entry point names puts its resolvers, as in vLLM."""

    _resolvers: dict[str, LoRAResolver] = {}

    @classmethod
    def register_resolver(cls, resolver_name: str, resolver: LoRAResolver) -> None:
        """Add one; another of the name gives way."""
        if not isinstance(resolver, LoRAResolver):
            raise TypeError(f"{resolver!r} is no LoRAResolver.")
        cls._resolvers[resolver_name] = resolver

    @classmethod
    def get_supported_resolvers(cls) -> Set[str]:
        """Their names."""
        return cls._resolvers.keys()

    @classmethod
    def get_resolver(cls, resolver_name: str) -> LoRAResolver:
        """One by its name. Raises KeyError."""
        if resolver_name not in cls._resolvers:
            raise KeyError(f"There is no LoRA resolver {resolver_name!r}.")
        return cls._resolvers[resolver_name]


def load_lora_resolvers() -> dict[str, LoRAResolver]:
    """By name, in its order: those of the wanted entry points and those that were registered.

    Raises `ConfigError` for one that can't be made.
    """
    made = {point.name: _made(point) for point in selected_entry_points(LORA_RESOLVER_GROUP)}
    found = {name: each for name, each in made.items() if each is not None}
    names = LoRAResolverRegistry.get_supported_resolvers()
    found |= {name: LoRAResolverRegistry.get_resolver(name) for name in names}
    return dict(sorted(found.items()))


def _made(point: EntryPoint) -> LoRAResolver | None:
    """None for a function that has registered what it brings."""
    found = resolve_entry_point(point)
    if found is None:
        return None
    kind = checked_class(point, found, LoRAResolver)  # type: ignore[type-abstract]
    try:
        return kind()
    except Exception as error:
        raise ConfigError(
            f"The LoRA resolver {point.name} ({point.value}) can't be made: {error}",
            param="QUIRE_PLUGINS",
        ) from error
