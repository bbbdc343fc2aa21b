"""Settings that a kind of model doesn't do are refused by name."""

from __future__ import annotations

import torch

from engine.contract.config import EngineConfig
from engine.contract.errors import ConfigError
from engine.models.interface import ModelSpec
from engine.models.kv_scale_file import PARAM
from kernels import KernelSet

HOST = torch.device("cpu")


def refuse_rope_settings(spec: ModelSpec, config: EngineConfig) -> None:
    """A setting that would do nothing is refused."""
    for name in ("rope_scaling", "rope_theta"):
        if getattr(config, name) is not None and spec.rope is None:
            raise ConfigError(
                f"{name} is set, but {spec.architecture} has no rotary embedding.", param=name
            )


def refuse_rounding(rounds: str | None, what: str) -> None:
    """Pooling models and classes from outside don't round weights while they load them."""
    if rounds is not None:
        raise ConfigError(f"quantization={rounds!r} isn't done for {what}.", param="quantization")


def refuse_kv_scale_file(config: EngineConfig, what: str) -> None:
    """Scales of an fp8 cache are for the native decoder's."""
    if config.quantization_param_path is not None:
        raise ConfigError(f"{PARAM} isn't used for {what}.", param=PARAM)


def refuse_invariance(config: EngineConfig, device: torch.device, what: str) -> None:
    """On a GPU torch's products run these, which sum by the size of a batch."""
    if config.batch_invariant and device != HOST:
        raise ConfigError(
            f"batch_invariant isn't done for {what} on a GPU.", param="batch_invariant"
        )


def refuse_unknown_rounding(rounds: str | None, ops: KernelSet) -> None:
    """Not every device has products for every method."""
    if rounds is not None and rounds not in ops.quantizations:
        raise ConfigError(
            f"quantization={rounds!r} isn't done by the {ops.name} kernels on "
            f"{ops.device.type}, which do {', '.join(ops.quantizations)}.",
            param="quantization",
        )
