"""`AdapterStore`: one model's adapters, on its device and in host memory.

The devices that run adapters are CPUs, which use host memory: an adapter that leaves the device
stays in its packed form, so that it returns without cost.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
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
from engine.models.vision.family import VisionDecoder
from engine.pooling.heads import ClassifierHeadFactory


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """Facts about an adapter on the device.

    Attributes:
        rank: maximum rank of its modules.
        num_bytes: bytes of device memory.
        load_seconds: seconds that loading took.
        vocab_size: vocabulary of its rows if it adds tokens; 0: the model's.
        changes_encoder: see `AdapterWeights`.
    """

    rank: int
    num_bytes: int
    load_seconds: float
    vocab_size: int = 0
    changes_encoder: bool = False


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Limits that an operator may set.

    Attributes:
        max_rank: maximum rank; None: unlimited.
        dtype: dtype of stored weights; None: that of their files.
        host_bytes: maximum bytes of adapters in host memory that aren't on the device.
        host_adapters: maximum number of these; None: unlimited.
    """

    max_rank: int | None = None
    dtype: torch.dtype | None = None
    host_bytes: int = 0
    host_adapters: int | None = None


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter in the form that kernels run, and the maximum rank of its modules."""

    weights: AdapterWeights
    rank: int


class AdapterStore:
    """Loads adapters and makes them available to steps. Loading is thread-safe.

    Attributes:
        device: adapters that steps may use, by digest.
    """

    def __init__(self, limits: StoreLimits) -> None:
        self._limits = limits
        self.device: dict[str, AdapterWeights] = {}
        self._host: OrderedDict[str, PackedAdapter] = OrderedDict()
        self._ranks: dict[str, int] = {}
        self._lock = threading.Lock()
        self._templates = PackingTemplates()
        self._modules: tuple[object, ClassifierHeadFactory | None, TargetModules] | None = None

    def load(
        self, ref: AdapterRef, model: AdaptableModel, heads: ClassifierHeadFactory | None = None
    ) -> AdapterFacts:
        """Load an adapter onto the device; `heads`: creates classifier heads.

        Raises `InvalidRequest` if the content of its files doesn't match its digest, or isn't
        supported for this model.
        """
        started = time.perf_counter()
        packed = self.stage(ref, model, heads)
        self.publish(packed)
        seconds = time.perf_counter() - started
        weights = packed.weights
        return AdapterFacts(
            packed.rank, weights.num_bytes, seconds, weights.vocab_size, weights.changes_encoder
        )

    def stage(
        self, ref: AdapterRef, model: AdaptableModel, heads: ClassifierHeadFactory | None = None
    ) -> PackedAdapter:
        """Read and pack an adapter, which steps can't use before `publish`. Raises as `load`."""
        with self._lock:
            packed = self._host.pop(ref.digest, None)
        if packed is None:
            packed = self._load_by_template(ref, model, heads) or self._load_by_reader(
                ref, model, heads
            )
        return packed

    def publish(self, packed: PackedAdapter) -> None:
        """Make a staged adapter available to steps."""
        digest = packed.weights.digest
        with self._lock:
            self._ranks[digest] = packed.rank
            self.device[digest] = packed.weights

    def unload(self, digest: str) -> None:
        """Free an adapter's device memory; host memory keeps a copy within its limits."""
        with self._lock:
            weights = self.device.pop(digest, None)
            if weights is not None:
                self._host[digest] = PackedAdapter(weights, self._ranks.pop(digest))
                self._trim()

    def drop_host_copy(self, digest: str) -> None:
        """Drop the copy in host memory of an adapter that isn't on the device."""
        with self._lock:
            self._host.pop(digest, None)

    def has_host_copy(self, digest: str) -> bool:
        """Whether host memory has a copy of an adapter that isn't on the device."""
        with self._lock:
            return digest in self._host

    def clear_host(self) -> None:
        """Drop all copies in host memory, since the model's weights may change."""
        with self._lock:
            self._host.clear()

    def _modules_of(
        self, model: AdaptableModel, heads: ClassifierHeadFactory | None
    ) -> TargetModules:
        """Return the model's modules, cached: a mixture of experts has tens of thousands."""
        cached = self._modules
        if cached is None or cached[0] is not model.spec or cached[1] is not heads:
            modules = modules_of(model, heads)
            self._templates.clear()
            cached = self._modules = model.spec, heads, modules
        return cached[2]

    def _load_by_template(
        self, ref: AdapterRef, model: AdaptableModel, heads: ClassifierHeadFactory | None
    ) -> PackedAdapter | None:
        """Load an adapter whose files have a known layout; None for another layout."""
        self._modules_of(model, heads)
        packed = self._templates.load(ref, model) if ref.path else None
        return None if packed is None else PackedAdapter(*packed)

    def _load_by_reader(
        self, ref: AdapterRef, model: AdaptableModel, heads: ClassifierHeadFactory | None
    ) -> PackedAdapter:
        modules, dtype = self._modules_of(model, heads), self._limits.dtype
        adapter = self._read(ref, modules)
        if isinstance(model, VisionDecoder) and model.only_encodes:
            adapter = _encoder_part(adapter, modules)
            return PackedAdapter(pack_adapter(adapter, model, dtype, heads, modules), adapter.rank)
        weights = pack_adapter(adapter, model, dtype, heads, modules)
        self._templates.add_template(ref.path, adapter, model, dtype, modules)
        # Load it by the new template: then it is contiguous in memory, which makes steps faster.
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
        """Drop copies in host memory, oldest first, until the rest is within the limits."""
        limits = self._limits
        num_bytes = sum(adapter.weights.num_bytes for adapter in self._host.values())
        while self._host and (
            num_bytes > limits.host_bytes
            or (limits.host_adapters is not None and len(self._host) > limits.host_adapters)
        ):
            num_bytes -= self._host.popitem(last=False)[1].weights.num_bytes


def _encoder_part(adapter: LoRAAdapter, modules: TargetModules) -> LoRAAdapter:
    """The changes of a model's encoder alone."""
    slots = {} if modules.vision is None else modules.layers[modules.vision]
    names = {part.name for linear in slots.values() for part in linear.parts}
    changed = {name: delta for name, delta in adapter.modules.items() if name in names}
    return LoRAAdapter(digest=adapter.digest, modules=changed, vocab_size=adapter.vocab_size)


class AdapterHost(Protocol):
    """The adapters that plans may refer to.

    Attributes:
        refusal: why this model doesn't support adapters, as a sentence; "" if it does.
        num_bytes: bytes of device memory for adapters.
        max_adapters: maximum number of adapters on the device; None: unlimited.
    """

    @property
    def refusal(self) -> str: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def max_adapters(self) -> int | None: ...

    def load(self, ref: AdapterRef) -> AdapterFacts:
        """Load an adapter onto the device, so that plans may refer to it. Thread-safe.

        Raises `InvalidRequest` if it can't be read, or isn't supported for this model.
        """

    def unload(self, digest: str) -> None:
        """Free an adapter's device memory; no later plan refers to it."""

    def drop_host_copy(self, digest: str) -> None:
        """Drop the copy in host memory of an adapter that isn't on the device."""

    def has_host_copy(self, digest: str) -> bool:
        """Whether host memory has a copy of an adapter that isn't on the device."""
