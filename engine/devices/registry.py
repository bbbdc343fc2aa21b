"""Devices by name: built-in ones, and those of installed packages."""

from __future__ import annotations

import functools
import importlib
import logging
import os
from typing import Any

import torch

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.contract.plugins import DEVICES, check_device, selected_entry_points
from engine.devices.device import CONTRACT_VERSION, Device
from engine.devices.package_calls import with_named_calls

log = logging.getLogger(__name__)

#: Tokens of a KV block that the kernels of all devices take.
_MAX_BLOCK_SIZE = 128

#: Imported on demand: a replica on CPUs doesn't need a GPU's packages.
_BUILT_IN = {
    "cpu": "engine.devices.cpu:CpuDevice",
    "cuda": "engine.devices.cuda:CudaDevice",
    "rocm": "engine.devices.rocm:RocmDevice",
}


def make_device(config: EngineConfig) -> Device:
    """The device that the settings name.

    Raises `ConfigError` for one that isn't there or can't do what they ask for.
    """
    name = _auto() if config.device == "auto" else config.device
    kind = device_class(name)
    if missing := sorted(kind.__abstractmethods__):
        raise ConfigError(
            f"The device plug-in {name} ({kind.__module__}.{kind.__qualname__}) lacks "
            f"{', '.join(missing)}.",
            param="device",
        )
    if kind.__module__.partition(".")[0] != "engine":
        kind = with_named_calls(kind)
    if obstacle := kind.unavailable_reason():
        raise ConfigError(f"device is {name}, but {obstacle}", param="device")
    cache = config.kv_cache_dtype
    if cache != "auto" and cache not in kind.kv_cache_dtypes:
        raise ConfigError(
            f"kv_cache_dtype {cache!r} isn't done on device {name}, which keeps "
            f"{', '.join(kind.kv_cache_dtypes)}.",
            param="kv_cache_dtype",
        )
    _check_additional_config(config.additional_config or {}, kind)
    if config.block_size > _MAX_BLOCK_SIZE and name != "cpu":
        raise ConfigError(
            f"block_size must be at most {_MAX_BLOCK_SIZE} on the device {name}; got "
            f"{config.block_size}.",
            param="block_size",
        )
    if kind.block_size and config.block_size != kind.block_size:
        log.warning(
            "block_size is %d: the device %s has no blocks of %d tokens.",
            kind.block_size, name, config.block_size,
        )  # fmt: skip
        config.block_size = kind.block_size
    return kind(config)


def _check_additional_config(values: dict[str, Any], kind: type[Device]) -> None:
    """Raise `ConfigError` for settings that belong to another device or that this one lacks."""
    settings = values.get(kind.name, {})
    unknown = sorted(values.keys() - {kind.name})
    unknown += sorted(settings.keys() - set(kind.additional_settings))
    if unknown:
        supported = ", ".join(kind.additional_settings) or "none"
        raise ConfigError(
            f"additional_config has {', '.join(unknown)}, which the device {kind.name} doesn't "
            f"take. Settings that it takes under {kind.name!r}: {supported}.",
            param="additional_config",
        )


def device_class(name: str) -> type[Device]:
    """The `Device` of a name. Raises `ConfigError` for a name or a plug-in that is no device."""
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        device = getattr(importlib.import_module(module), attribute)
    else:
        check_device(name)
        point = next(point for point in selected_entry_points(DEVICES) if point.name == name)
        try:
            device = point.load()
        except Exception as error:  # another package's module may raise anything
            raise ConfigError(
                f"The device plug-in {name} ({point.value}) failed: "
                f"{type(error).__name__}: {error}",
                param="device",
            ) from error
    if not (isinstance(device, type) and issubclass(device, Device)):
        raise ConfigError(
            f"The device plug-in {name} names {device!r}, which is no subclass of "
            "engine.devices.Device.",
            param="device",
        )
    if device.contract_version != CONTRACT_VERSION:
        raise ConfigError(
            f"The device plug-in {name} was written for version {device.contract_version} of the "
            f"device contract; this engine has version {CONTRACT_VERSION}.",
            param="device",
        )
    return device


def _auto() -> str:
    """A GPU where torch sees one and Triton can compile for it, else the CPU."""
    if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        return "cpu"
    from engine.devices.cuda import has_triton

    if not has_triton():
        _warn_unused_gpu()
        return "cpu"
    return "cuda" if torch.version.hip is None else "rocm"


@functools.cache
def _warn_unused_gpu() -> None:
    """Once a process: it may load several models."""
    log.warning(
        "torch sees a GPU, but Triton, which the GPU kernels are written in, is not installed: "
        "the model runs on the CPU. To use the GPU: pip install triton. To keep the CPU: "
        "--device cpu."
    )
