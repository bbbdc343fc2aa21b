"""`LoraWorker`: the adapters of a model on the executor's device."""

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
    """Maximum bytes of this rank's adapters in host memory, which all ranks share."""
    return adapter_bytes(32, 1) // config.tensor_parallel_size


class LoraWorker:
    """See `AdapterHost`. It holds adapters between `prepare` and `clear_host`."""

    def __init__(
        self, config: EngineConfig, device: Device, dtypes: Mapping[str, torch.dtype]
    ) -> None:
        """`dtypes`: by their names in the settings."""
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
        """Set the model on the device, whose adapters are loaded from here on."""
        self._loaded = loaded
        self._obstacle = self._device.prepare_adapters(loaded)

    @property
    def by_digest(self) -> Mapping[str, AdapterWeights]:
        """The adapters that steps may use."""
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
            return self._obstacle or getattr(model, "adapter_refusal", "")
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
        """Read and pack an adapter, which steps can't use before `publish`. Raises as `load`."""
        return self._store.stage(ref, *self._target)

    def publish(self, packed: PackedAdapter) -> None:
        """Make a staged adapter available to steps."""
        self._store.publish(packed)

    @property
    def _target(self) -> tuple[AdaptableModel, ClassifierHeadFactory | None]:
        """The layout for which adapters are packed."""
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
        """Drop all host copies: they may refer to parts of weights that are released."""
        self._store.clear_host()
