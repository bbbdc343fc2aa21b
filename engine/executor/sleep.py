"""`Sleeper`: gives a model's memory back for a while, and takes it again."""

from __future__ import annotations

import ctypes
import gc
import logging
import time
from typing import Any, cast

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.executor.held import HostCopy, tensors_of
from engine.models.interface import EngineModel
from engine.models.loader import LoadedModel, reload_model
from engine.protocol import KV_CACHE, WEIGHTS

log = logging.getLogger(__name__)


class Absent:
    """Stands where a model was whose weights are gone."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} was asked of a model whose weights sleep.")


class Sleeper:
    """What of one model sleeps.

    Level 1 gives the KV cache back, and a GPU's weights to host memory (on a CPU they are there
    already, and stay). Level 2 gives the weights back as well; they are read anew when they wake.

    Attributes:
        asleep: which of `WEIGHTS` and `KV_CACHE`.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig, device: torch.device) -> None:
        self._loaded, self._config, self._device = loaded, config, device
        self.asleep: set[str] = set()
        self._host: HostCopy | None = None
        self._gone = False

    def check(self) -> None:
        """Raise `ConfigError` for a model that can't give its KV cache back."""
        model = self._loaded.model
        if not self._gone and not hasattr(model, "release_kv"):
            raise ConfigError(
                f"{type(model).__name__} has no release_kv: it can't sleep.",
                param="enable_sleep_mode",
            )

    def sleep(self, level: int) -> None:
        """Give the memory back; a deeper sleep may follow a lighter one."""
        started = time.perf_counter()
        if not self.asleep:
            cast(Any, self._loaded.model).release_kv()
        self.asleep = {WEIGHTS, KV_CACHE}
        if level == 2:
            self._host, self._gone = None, True
            self._loaded.model = cast(EngineModel, Absent())
        elif self._device.type != "cpu" and self._host is None and not self._gone:
            held = tensors_of((self._loaded.model, self._loaded.pooler))
            self._host = HostCopy(held, self._device, pinned=True)
        give_back_memory(self._device)
        log.info("Asleep at level %d after %.2f s", level, time.perf_counter() - started)

    def wake_weights(self) -> None:
        """Bring the weights back. Raises `ModelLoadError` where they can't be read any more."""
        if WEIGHTS not in self.asleep:
            return
        started = time.perf_counter()
        if self._gone:
            reload_model(self._loaded, self._config)
            self._gone = False
        elif self._host is not None:
            self._host.restore()
            self._host = None
        self.asleep.discard(WEIGHTS)
        log.info("The weights woke in %.2f s", time.perf_counter() - started)


def give_back_memory(device: torch.device) -> None:
    """Hand freed memory to the system, or to the device's other users."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
