"""`LoraWorker`: the adapters of a model on the device that an executor has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch

from engine.contract.engine_config import EngineConfig
from engine.contract.lora import AdapterRef
from engine.devices.device import Device, adapter_bytes
from engine.lora.layer_delta import AdaptableModel
from engine.lora.store import AdapterFacts, AdapterStore, PackedAdapter, StoreLimits
from engine.model_loader.loader import LoadedModel
from engine.models.lora import AdapterWeights
from engine.models.supports_lora import SupportsLoRA
from engine.pooling.heads import ClassifierHeadFactory


def _host_bytes(config: EngineConfig) -> int:
    """Bytes of this rank's adapters that wait in host memory, which all ranks share."""
    return adapter_bytes(32, 1) // config.tensor_parallel_size


class LoraWorker:
    """See `AdapterHost`. Between `prepare` and `clear_host` there may be some."""

    def __init__(
        self, config: EngineConfig, device: Device, dtypes: Mapping[str, torch.dtype]
    ) -> None:
        """`dtypes`: by the names that settings have for them."""
        self._config, self._device = config, device
        self._loaded: LoadedModel | None = None
        self._obstacle = ""
        self._store = AdapterStore(
            StoreLimits(
                max_rank=device.max_adapter_rank,
                dtype=None if config.lora_dtype == "auto" else dtypes[config.lora_dtype],
                host_bytes=_host_bytes(config) if device.caches_adapters_on_host else 0,
                host_adapters=config.max_cpu_loras,
            )
        )

    def prepare(self, loaded: LoadedModel) -> None:
        """A model is on the device, whose adapters these are from here on."""
        self._loaded = loaded
        self._obstacle = self._device.prepare_adapters(loaded)

    @property
    def by_digest(self) -> Mapping[str, AdapterWeights]:
        """Those that steps may name."""
        return self._store.device

    @property
    def refusal(self) -> str:
        if not self._config.enable_lora:
            return "Adapters are turned off here (enable_lora)."
        if not self._device.runs_adapters:
            return f"Adapters aren't supported on the device {self._device.name}."
        if self._loaded is None:
            return "There is no model yet."
        model = self._loaded.model
        if isinstance(model, SupportsLoRA):
            return self._obstacle
        other = (
            "Adapters are for models that run on Quire's own decoders and encoders or on the "
            f"Transformers bridge; this {self._loaded.spec.architecture} doesn't."
        )
        refusal: str = getattr(model, "adapter_refusal", other)
        return refusal

    @property
    def num_bytes(self) -> int:
        return self._device.adapter_bytes() // self._config.world_size

    @property
    def max_adapters(self) -> int | None:
        return self._device.max_adapters

    def load(self, ref: AdapterRef) -> AdapterFacts:
        return self._store.load(ref, *self._target)

    def stage(self, ref: AdapterRef) -> PackedAdapter:
        """Read and pack an adapter, which no step finds before `publish`. Raises as `load`."""
        return self._store.stage(ref, *self._target)

    def publish(self, packed: PackedAdapter) -> None:
        """Let steps find an adapter that is staged."""
        self._store.publish(packed)

    @property
    def _target(self) -> tuple[AdaptableModel, ClassifierHeadFactory | None]:
        """What adapters are packed for."""
        if self._loaded is None:
            raise RuntimeError("There is no model yet.")
        pooler = self._loaded.pooler
        heads = None if pooler is None else pooler.maker
        return cast(AdaptableModel, self._loaded.model), heads

    def unload(self, digest: str) -> None:
        self._store.unload(digest)

    def drop_host_copy(self, digest: str) -> None:
        self._store.drop_host_copy(digest)

    def has_host_copy(self, digest: str) -> bool:
        return self._store.has_host_copy(digest)

    def clear_host(self) -> None:
        """Let go of what host memory has: it may hold parts of weights that go."""
        self._store.clear_host()
