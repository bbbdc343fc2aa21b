"""`AdapterStore`: the adapters beside one model, on its device and in the host's memory.

The devices that run adapters are CPUs, whose memory is the host's: an adapter that leaves the
device is kept as it was there, so that it comes back for nothing.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from engine.contract.errors import InvalidRequest
from engine.contract.lora import AdapterRef
from engine.lora.adapter import LoRAAdapter
from engine.lora.layer_delta import AdaptableModel
from engine.lora.packing import modules_of, pack_adapter
from engine.lora.packing_template import PackingTemplates
from engine.lora.reader import read_adapter
from engine.lora.target_modules import TargetModules
from engine.models.lora import AdapterWeights
from engine.pooling.heads import ClassifierHeadFactory


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """What is known of an adapter on the device.

    Attributes:
        rank: the largest of its modules.
        num_bytes: of device memory.
        load_seconds: how long it took to bring it there.
        vocab_size: of its rows, where it brings tokens; 0: the model's.
        changes_vision: whether pictures are encoded anew with it.
    """

    rank: int
    num_bytes: int
    load_seconds: float
    vocab_size: int = 0
    changes_vision: bool = False


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """What an operator may bound.

    Attributes:
        max_rank: higher ones are refused; None: any.
        dtype: what weights are kept in; None: as their files keep them.
        host_bytes: of adapters that wait in host memory for another turn on the device.
        host_adapters: how many of them; None: as many as fit.
    """

    max_rank: int | None = None
    dtype: torch.dtype | None = None
    host_bytes: int = 0
    host_adapters: int | None = None


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter as kernels run it, and the largest rank of its modules."""

    weights: AdapterWeights
    rank: int


class AdapterStore:
    """Reads adapters and puts them where steps find them. Any thread may load.

    Attributes:
        device: by digest, those that steps may name.
    """

    def __init__(self, limits: StoreLimits) -> None:
        self._limits = limits
        self._device: dict[str, AdapterWeights] = {}
        self._host: OrderedDict[str, PackedAdapter] = OrderedDict()
        self._ranks: dict[str, int] = {}
        self._lock = threading.Lock()
        self._templates = PackingTemplates()
        self._modules: tuple[object, ClassifierHeadFactory | None, TargetModules] | None = None

    @property
    def device(self) -> Mapping[str, AdapterWeights]:
        """See the class."""
        return self._device

    def load(
        self, ref: AdapterRef, model: AdaptableModel, heads: ClassifierHeadFactory | None = None
    ) -> AdapterFacts:
        """Bring an adapter to the device; `heads` are of a classifier.

        Raises `InvalidRequest` where its files are of another content than its digest, or hold what
        this model can't have.
        """
        started = time.perf_counter()
        packed = self.stage(ref, model, heads)
        self.publish(packed)
        seconds = time.perf_counter() - started
        weights = packed.weights
        return AdapterFacts(
            packed.rank, weights.num_bytes, seconds, weights.vocab_size, bool(weights.vision)
        )

    def stage(
        self, ref: AdapterRef, model: AdaptableModel, heads: ClassifierHeadFactory | None = None
    ) -> PackedAdapter:
        """Read and pack an adapter, which no step finds before `publish`. Raises as `load`."""
        with self._lock:
            packed = self._host.pop(ref.digest, None)
        if packed is None:
            packed = self._load_by_template(ref, model, heads) or self._load_by_reader(
                ref, model, heads
            )
        return packed

    def publish(self, packed: PackedAdapter) -> None:
        """Let steps find an adapter that is staged."""
        digest = packed.weights.digest
        with self._lock:
            self._ranks[digest] = packed.rank
            self._device[digest] = packed.weights

    def unload(self, digest: str) -> None:
        """Free an adapter's device memory; host memory keeps it as far as there is room."""
        with self._lock:
            weights = self._device.pop(digest, None)
            if weights is not None:
                self._host[digest] = PackedAdapter(weights, self._ranks.pop(digest))
                self._trim()

    def drop_host_copy(self, digest: str) -> None:
        """Let go of what host memory has of an adapter that isn't on the device."""
        with self._lock:
            self._host.pop(digest, None)

    def has_host_copy(self, digest: str) -> bool:
        """Whether host memory has an adapter that isn't on the device."""
        with self._lock:
            return digest in self._host

    def clear_host(self) -> None:
        """Let those go that aren't on the device: the model's weights may change."""
        with self._lock:
            self._host.clear()

    def _modules_of(
        self, model: AdaptableModel, heads: ClassifierHeadFactory | None
    ) -> TargetModules:
        """The model's, listed once: a mixture of experts has tens of thousands."""
        cached = self._modules
        if cached is None or cached[0] is not model.spec or cached[1] is not heads:
            modules = modules_of(model, heads)
            self._templates.clear()
            cached = self._modules = model.spec, heads, modules
        return cached[2]

    def _load_by_template(
        self, ref: AdapterRef, model: AdaptableModel, heads: ClassifierHeadFactory | None
    ) -> PackedAdapter | None:
        """An adapter whose files are laid out as others' were."""
        self._modules_of(model, heads)
        packed = self._templates.load(ref, model) if ref.path else None
        return None if packed is None else PackedAdapter(*packed)

    def _load_by_reader(
        self, ref: AdapterRef, model: AdaptableModel, heads: ClassifierHeadFactory | None
    ) -> PackedAdapter:
        """Any adapter."""
        modules, dtype = self._modules_of(model, heads), self._limits.dtype
        adapter = self._read(ref, modules)
        weights = pack_adapter(adapter, model, dtype, heads, modules)
        self._templates.add_template(ref.path, adapter, model, dtype, modules)
        # In one piece, as those that follow: steps read it faster.
        again = self._templates.load(ref, model)
        return PackedAdapter(weights, adapter.rank) if again is None else PackedAdapter(*again)

    def _read(self, ref: AdapterRef, modules: TargetModules) -> LoRAAdapter:
        if not ref.path:
            raise InvalidRequest(
                f"The adapter {ref.name or ref.digest[:12]!r} isn't loaded, and nothing says where "
                "it lies.",
                param="model",
            )
        adapter = read_adapter(Path(ref.path), modules, self._limits.max_rank)
        if adapter.digest != ref.digest:
            raise InvalidRequest(
                f"The adapter {ref.name or ref.digest[:12]!r} isn't there any more: its files hold "
                f"{adapter.digest[:12]}..., not {ref.digest[:12]}...",
                param="model",
            )
        return adapter

    def _trim(self) -> None:
        """Let those go that left the device longest ago, until the rest fits."""
        limits = self._limits
        num_bytes = sum(adapter.weights.num_bytes for adapter in self._host.values())
        while self._host and (
            num_bytes > limits.host_bytes
            or (limits.host_adapters is not None and len(self._host) > limits.host_adapters)
        ):
            num_bytes -= self._host.popitem(last=False)[1].weights.num_bytes


class AdapterHost(Protocol):
    """The adapters that plans may name.

    Attributes:
        refusal: why this model has no adapters, as a sentence; "" where it may.
        num_bytes: of device memory for adapters.
        max_adapters: how many may be on the device at once; None: as many as fit.
    """

    @property
    def refusal(self) -> str: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def max_adapters(self) -> int | None: ...

    def load(self, ref: AdapterRef) -> AdapterFacts:
        """Bring an adapter to the device, where plans may name it. Any thread may call it.

        Raises `InvalidRequest` where it can't be had, or can't be run with this model.
        """

    def unload(self, digest: str) -> None:
        """Free an adapter's device memory: no later plan names it."""

    def drop_host_copy(self, digest: str) -> None:
        """Let go of what host memory has of an adapter that isn't on the device."""

    def has_host_copy(self, digest: str) -> bool:
        """Whether host memory has an adapter that isn't on the device."""
