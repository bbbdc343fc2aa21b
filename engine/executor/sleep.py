"""`SleepController`: releases a model's memory for a while, and restores it."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from typing import Any, cast

from torch import Tensor

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.contract.messages import KV_CACHE, WEIGHTS
from engine.devices.device import Device
from engine.devices.offload import HostCopy, iter_tensors
from engine.model_loader.loader import LoadedModel, reload_model
from engine.models.interface import EngineModel

log = logging.getLogger(__name__)


class ReleasedModel:
    """Placeholder for a model whose weights were released."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} was asked of a model whose weights sleep.")


class SleepController:
    """The parts of a model that sleep.

    Level 1 releases the KV cache, and moves a GPU's weights to host memory (on a CPU they stay).
    Level 2 releases the weights as well; they are read again on waking up.

    Attributes:
        asleep: which of `WEIGHTS` and `KV_CACHE` sleep.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig, device: Device) -> None:
        self._loaded, self._config, self._device = loaded, config, device
        self.asleep: set[str] = set()
        self._host: HostCopy | None = None
        self._gone = False

    def check(self) -> None:
        """Raise `ConfigError` for a model that can't release its KV cache."""
        model = self._loaded.model
        if not self._gone and not hasattr(model, "release_kv"):
            raise ConfigError(
                f"{type(model).__name__} has no release_kv: it can't sleep.",
                param="enable_sleep_mode",
            )

    def sleep(self, level: int) -> None:
        """Release the memory; a deeper sleep may follow a lighter one."""
        started = time.perf_counter()
        if not self.asleep:
            cast(Any, self._loaded.model).release_kv()
        self.asleep = {WEIGHTS, KV_CACHE}
        if level == 2:
            if self._host is not None:
                self._host.discard()
            self._host, self._gone = None, True
            self._loaded.model = cast(EngineModel, ReleasedModel())
        elif self._host is None and not self._gone:
            self._host = self._device.offload(model_tensors(self._loaded))
        self._device.release_memory()
        log.info("Asleep at level %d after %.2f s", level, time.perf_counter() - started)

    def reload_weights(self) -> None:
        """Restore the weights. Raises `ModelLoadError` if they can't be read any more."""
        if WEIGHTS not in self.asleep:
            return
        started = time.perf_counter()
        if self._gone:
            device = self._device
            reload_model(self._loaded, self._config, device.kernels, device.build_model)
            self._gone = False
        elif self._host is not None:
            self._host.restore()
            self._host = None
        self.asleep.discard(WEIGHTS)
        log.info("The weights woke in %.2f s", time.perf_counter() - started)


def model_tensors(loaded: LoadedModel) -> Iterator[Tensor]:
    """A model's tensors: those that it lists, otherwise those reachable from it."""
    named = getattr(loaded.model, "named_tensors", None)
    tensors = iter_tensors(loaded.model) if named is None else (tensor for _, tensor in named())
    encoder = getattr(loaded.model, "family", None)
    return itertools.chain(tensors, iter_tensors(encoder), iter_tensors(loaded.pooler))
