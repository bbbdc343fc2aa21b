"""Entry points of installed packages that plug into Quire. Torch-free; imports none of them.

QUIRE_PLUGINS (or vLLM's VLLM_PLUGINS), if set, is a comma-separated list of the plug-ins to load;
"" means none.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

import numpy

from engine.contract.errors import ConfigError
from engine.contract.lora import LoRARequest
from engine.contract.pooling_params import PoolingParams

log = logging.getLogger(__name__)

Kind = TypeVar("Kind")
DEVICES = "quire.devices"
#: Entry points of vLLM that are handled by name.
VLLM_PLATFORMS = "vllm.platform_plugins"
_BUILT_IN_DEVICES = ("auto", "cpu", "cuda", "rocm")
_NO_PACKAGE = "There is no package for it; docs/extending/device.md describes how to write one."
_TO_BRING = "There is no package for it; docs/extending/accelerators.md says what it must bring."
#: By vLLM's names of devices, what to use instead.
_DEVICE_REMEDIES = {
    "jax-cpu": "Install packages/jax-cpu (docs/devices.md).",
    "openvino": "Install packages/openvino (docs/devices.md).",
    "tt": "Install packages/tt (docs/tenstorrent.md).",
    "xpu": _TO_BRING,
    "tpu": f"{_TO_BRING} packages/jax-cpu runs the same way on CPUs.",
    "neuron": _TO_BRING,
    "hpu": _NO_PACKAGE,
}


def is_selected(name: str) -> bool:
    """Whether QUIRE_PLUGINS is unset or has this name."""
    names = os.environ.get("QUIRE_PLUGINS", os.environ.get("VLLM_PLUGINS"))
    return names is None or name in {part.strip() for part in names.split(",")}


def selected_entry_points(group: str) -> list[EntryPoint]:
    """Return the group's entry points that QUIRE_PLUGINS selects."""
    return [point for point in _installed(group, tuple(sys.path)) if is_selected(point.name)]


#: vLLM's groups with the same meaning, for packages that import `engine` instead of `vllm`.
_VLLM_GROUPS = {
    "quire.general_plugins": "vllm.general_plugins",
    "quire.io_processors": "vllm.io_processor_plugins",
    "quire.logits_processors": "vllm.logits_processors",
    "quire.stat_loggers": "vllm.stat_logger_plugins",
}


@cache
def _installed(group: str, folders: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points of packages in these folders, vLLM's groups included.

    Cached: the scan takes longer than the rest of a small model's start.
    """
    points = list(entry_points(group=group))
    names = {point.name for point in points}
    for point in entry_points(group=_VLLM_GROUPS[group]) if group in _VLLM_GROUPS else ():
        if _requires_vllm(point):
            log.warning(
                "Plug-in %s (%s) isn't loaded: its package requires vllm. For Quire import engine "
                "instead.",
                point.name,
                point.value,
            )
        elif point.name not in names:
            points.append(point)
    return tuple(points)


def _requires_vllm(point: EntryPoint) -> bool:
    """Whether the package of an entry point depends on vLLM, and extends only vLLM.

    The dependency may be optional, in an extra.
    """
    requirements = (point.dist.requires if point.dist else None) or []
    return any(
        re.match(r"vllm(?![\w.-])(?!.*\bextra\b)", requirement, re.IGNORECASE)
        for requirement in requirements
    )


def load_subclass(point: EntryPoint, base: type[Kind]) -> type[Kind]:
    """Return the subclass of `base` that an entry point names.

    As in vLLM it may also name a function that returns the class, or its "package.module.Class".

    Raises `ConfigError` if it can't be imported or isn't such a class.
    """
    return checked_class(point, resolve_entry_point(point), base)


def resolve_entry_point(point: EntryPoint) -> object:
    """Return the object of an entry point: a function's result, or the target of a dotted path.

    Raises `ConfigError` if it can't be imported or fails.
    """
    try:
        target = point.load()
        if not isinstance(target, type) and callable(target):
            target = target()
        if isinstance(target, str):
            module, _, name = target.rpartition(".")
            target = getattr(import_module(module), name)
        return target
    except Exception as error:
        raise ConfigError(
            f"The plugin {point.name} ({point.value}) can't be loaded: {error}",
            param="QUIRE_PLUGINS",
        ) from error


def checked_class(point: EntryPoint, kind: object, base: type[Kind]) -> type[Kind]:
    """Return `kind` if it is a subclass of `base`. Raises `ConfigError` otherwise."""
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise ConfigError(
            f"The plugin {point.name} ({point.value}) is no subclass of "
            f"{base.__module__}.{base.__qualname__}.",
            param="QUIRE_PLUGINS",
        )
    return kind


def check_device(name: str) -> None:
    """Raise `ConfigError` unless this is a built-in or installed device."""
    if name in _BUILT_IN_DEVICES:
        return
    installed = sorted(point.name for point in selected_entry_points(DEVICES))
    if name not in installed:
        allowed = ", ".join([*_BUILT_IN_DEVICES, *installed])
        remedy = _DEVICE_REMEDIES.get(name, "")
        if any(point.name == name for point in selected_entry_points(VLLM_PLATFORMS)):
            remedy = (
                f"The plug-in {name} is a platform of vLLM, whose workers can't run here; a device "
                "of Quire is an entry point in quire.devices (docs/extending/device.md)."
            )
        raise ConfigError(
            f"device must be one of {allowed}; got {name!r}. {remedy}".rstrip(), param="device"
        )


def check_additional_config(values: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless each device's settings are an object."""
    for name, settings in values.items():
        if not isinstance(settings, dict):
            raise ConfigError(
                f"additional_config must have an object of settings under {name!r}; got "
                f"{settings!r}.",
                param="additional_config",
            )


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
    """The model's result for one prompt."""

    prompt_token_ids: list[int]
    outputs: PooledData


class IOProcessor(ABC, Generic[Input, Output]):
    """Converts a caller's data into prompts of a pooling model, and its results into a response.

    There is one per process, called from several threads at once. A `ValueError` of `parse_data` or
    `pre_process` is the caller's mistake and returned as 400, with its text.

    Args:
        model: the served model's name.
    """

    def __init__(self, model: str) -> None:
        self.model = model

    @abstractmethod
    def parse_data(self, data: Any) -> Input:
        """Check the caller's `data`, decoded JSON. Raises ValueError."""

    @abstractmethod
    def pre_process(self, prompt: Input, request_id: str | None = None) -> Sequence[IOPrompt]:
        """Return the prompts to pool; at least one."""

    def merge_pooling_params(self, params: PoolingParams | None = None) -> PoolingParams:
        """Return the parameters of the prompts; `params` are the caller's."""
        return params or PoolingParams()

    @abstractmethod
    def post_process(
        self, model_output: Sequence[PooledPrompt], request_id: str | None = None
    ) -> Output:
        """Return the response; one output per prompt, in order. Must be JSON over HTTP."""


def io_processor_entry_point(name: str) -> EntryPoint:
    """Return the entry point of the processor with this name. Raises `ConfigError` if unknown."""
    points = {point.name: point for point in selected_entry_points(GROUP)}
    if name not in points:
        available = f"There are: {', '.join(sorted(points))}" if points else "None is installed"
        raise ConfigError(
            f"There is no IO processor {name[:100]!r} here. {available}.",
            param="io_processor_plugin",
        )
    return points[name]


@lru_cache(maxsize=64)
def io_processor(name: str, model: str) -> IOProcessor[Any, Any]:
    """Return the installed processor with this name.

    Raises `ConfigError` if it is unknown or can't be created.
    """
    kind = load_subclass(io_processor_entry_point(name), IOProcessor)  # type: ignore[type-abstract]
    try:
        return kind(model)
    except Exception as error:
        raise ConfigError(
            f"The IO processor {name} can't be made: {error}", param="io_processor_plugin"
        ) from error


LORA_RESOLVER_GROUP = "quire.lora_resolvers"


class LoRAResolver(ABC):
    """Finds the files of an adapter that a request names and that isn't loaded.

    There is one per gateway and worker, called in its event loop: run slow work in a thread. An
    exception is logged, and the caller is asked to try again.
    """

    @abstractmethod
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Return the adapter, or None if it is unknown.

        The result is the same for all tenants: a resolver doesn't know the tenant.

        Args:
            base_model_name: the folder or hub id that the model was loaded from, or its served
            name. lora_name: as the client sent it, without the model's name.
        """


class LoRAResolverRegistry:
    """Registry for entry points that are functions which register resolvers, as in vLLM."""

    _resolvers: dict[str, LoRAResolver] = {}

    @classmethod
    def register_resolver(cls, resolver_name: str, resolver: LoRAResolver) -> None:
        """Add a resolver, replacing one of the same name."""
        if not isinstance(resolver, LoRAResolver):
            raise TypeError(f"{resolver!r} is no LoRAResolver.")
        cls._resolvers[resolver_name] = resolver

    @classmethod
    def get_supported_resolvers(cls) -> Set[str]:
        """Return the names of all resolvers."""
        return cls._resolvers.keys()

    @classmethod
    def get_resolver(cls, resolver_name: str) -> LoRAResolver:
        """Return a resolver by its name. Raises KeyError."""
        if resolver_name not in cls._resolvers:
            raise KeyError(f"There is no LoRA resolver {resolver_name!r}.")
        return cls._resolvers[resolver_name]


def load_lora_resolvers() -> dict[str, LoRAResolver]:
    """Return the resolvers of selected entry points and registered ones, sorted by name.

    Raises `ConfigError` for one that can't be created.
    """
    resolvers: dict[str, LoRAResolver] = {}
    for point in selected_entry_points(LORA_RESOLVER_GROUP):
        if (resolver := _create_resolver(point)) is not None:
            resolvers[point.name] = resolver
    for name in LoRAResolverRegistry.get_supported_resolvers():
        resolvers[name] = LoRAResolverRegistry.get_resolver(name)
    return dict(sorted(resolvers.items()))


def _create_resolver(point: EntryPoint) -> LoRAResolver | None:
    """Return None for a function that has registered its resolvers."""
    target = resolve_entry_point(point)
    if target is None:
        return None
    kind = checked_class(point, target, LoRAResolver)  # type: ignore[type-abstract]
    try:
        return kind()
    except Exception as error:
        raise ConfigError(
            f"The LoRA resolver {point.name} ({point.value}) can't be made: {error}",
            param="QUIRE_PLUGINS",
        ) from error
