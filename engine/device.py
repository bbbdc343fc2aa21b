"""On which device a model runs."""

from __future__ import annotations

import importlib.util
import os

import torch

import kernels
from engine.config import EngineConfig
from engine.errors import ConfigError


def resolve_device(wanted: str) -> str:
    """ "cpu" or "cuda". `auto` is a GPU where torch sees one and Triton can compile for it.

    Raises `ConfigError` for a GPU that isn't there.
    """
    if wanted == "cpu":
        return "cpu"
    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise ConfigError("device is cuda, but torch sees no CUDA device.", param="device")
    if not there or (wanted == "auto" and importlib.util.find_spec("triton") is None):
        return "cpu"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "cpu"
    return "cuda"


def kernels_for(config: EngineConfig) -> kernels.KernelSet:
    """The kernels of the device that `config` names.

    Raises `ConfigError` for a device that isn't there, and where the environment asks for kernels
    that can't run on it.
    """
    try:
        return kernels.get(resolve_device(config.device), use_compiled=config.cpu_kernels)
    except kernels.KernelsUnavailable as error:
        raise ConfigError(str(error), param=error.param) from error
