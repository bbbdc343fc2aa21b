"""`KVTransfer`: a worker's KV connector and its part in each step."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from torch import Tensor

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.contract.kv_transfer_config import (
    MULTI_CONNECTOR,
    NATIVE,
    NIXL_CONNECTOR,
    NIXL_DEFAULTS,
    OFFLOADING_CONNECTOR,
    PEER_SCHEME,
    ECTransferConfig,
    KVTransferConfig,
)
from engine.contract.replica_state import Numerics
from engine.contract.speculative_config import HEADS
from engine.distributed.parallel_state import parse_partition
from engine.kv_cache.kv_cache_config import KVCacheConfig, single_group_config
from engine.kv_transfer.base import KVConnectorBase, KVLoadError
from engine.kv_transfer.block_buffers import BlockBuffers
from engine.kv_transfer.disk_tier import DiskTier
from engine.kv_transfer.ec_connector import ECConnector
from engine.kv_transfer.host_tier import HostTier
from engine.kv_transfer.multi_connector import MultiConnector
from engine.kv_transfer.nixl_connector import NixlConnector
from engine.kv_transfer.offloading_connector import OffloadingConnector
from engine.kv_transfer.peer_tier import PeerTier
from engine.kv_transfer.rank_connector import RankConnector
from engine.kv_transfer.ranked_storage import RankedStorage
from engine.kv_transfer.remote_tier import RemoteTier, make_store
from engine.kv_transfer.storage_queue import StorageQueue
from engine.kv_transfer.storage_tier import StorageTier
from engine.models.decoder import NativeDecoder
from engine.models.encoder_decoder import EncoderDecoder
from engine.models.interface import SupportsMultiModal
from engine.scheduler.plan import StepPlan

if TYPE_CHECKING:
    from engine.executor.worker import Worker

log = logging.getLogger(__name__)

#: Capacity of other ranks' host memory: the first one tells them what to remove.
_UNBOUNDED = 1 << 62


class KVTransfer:
    """Calls a connector before and after the steps that involve it.

    Layers aren't loaded or saved one by one: all before, and all after the forward pass.
    """

    def __init__(self, connector: KVConnectorBase) -> None:
        self.connector = connector
        self._layers: dict[str, tuple[Tensor, ...]] = {}

    @property
    def ec_connector(self) -> ECConnector | None:
        """Saves and loads encoder outputs; None: nothing does."""
        connectors = [self.connector]
        if isinstance(self.connector, MultiConnector):
            connectors = self.connector.connectors
        return next(
            (
                connector.ec_connector
                for connector in connectors
                if isinstance(connector, OffloadingConnector)
            ),
            None,
        )

    def register(self, model: Any) -> None:
        """Give the connector the model's new KV cache."""
        self._layers = _kv_caches(model)
        self.connector.register_kv_caches(self._layers)

    @contextmanager
    def step(self, plan: StepPlan) -> Iterator[None]:
        """Context in which a step with `kv_meta` runs. Raises `KVLoadError`."""
        connector, kv_meta = self.connector, plan.kv_meta
        connector.last_step = plan.step
        metadata = msgspec.msgpack.decode(kv_meta, type=connector.metadata_type)
        connector.bind_connector_metadata(metadata)
        try:
            try:
                connector.start_load_kv()
                for name in self._layers:
                    connector.wait_for_layer_load(name)
            except Exception as error:
                raise KVLoadError(f"{type(error).__name__}: {error}") from error
            yield
            for name, tensors in self._layers.items():
                connector.save_kv_layer(name, tensors)
            connector.wait_for_save()
        finally:
            connector.clear_connector_metadata()


def make_kv_transfer(config: EngineConfig, worker: Worker) -> KVTransfer | None:
    """The KV connector of a worker whose cache is sized; None: the settings ask for none.

    Raises `ConfigError` for a connector that can't be used with the model.
    """
    values = config.kv_transfer_config
    offloads = config.kv_offloading_size > 0
    if not (values or offloads or config.swaps):
        return None
    settings = KVTransferConfig.from_mapping(values or {})
    if reason := _unsupported_reason(config, worker):
        if values or offloads:
            param = "kv_transfer_config" if values else "kv_offloading_size"
            raise ConfigError(f"{param} can't be used: {reason}.", param=param)
        log.warning("swap_space isn't used: %s.", reason)
        return None
    if config.ec_transfer_config and not isinstance(worker.loaded.model, SupportsMultiModal):
        raise ConfigError(
            f"ec_transfer_config can't be used: {worker.loaded.spec.architecture} has no encoder "
            "whose outputs stand for tokens.",
            param="ec_transfer_config",
        )
    if config.only_encodes and settings.kv_connector != OFFLOADING_CONNECTOR:
        raise ConfigError(
            f"kv_connector={settings.kv_connector!r} can't be used with ec_role=ec_producer: the "
            "replica has no decoder, and so no KV blocks to save.",
            param="kv_transfer_config",
        )
    if worker.rank:
        return KVTransfer(_make_rank_connector(settings, config, worker))
    if settings.kv_connector != MULTI_CONNECTOR:
        return KVTransfer(_make_connector(settings, config, worker))
    connectors = [_make_connector(part, config, worker) for part in settings.connectors]
    return KVTransfer(MultiConnector(connectors))


def _make_connector(
    settings: KVTransferConfig, config: EngineConfig, worker: Worker
) -> KVConnectorBase:
    if settings.kv_connector == OFFLOADING_CONNECTOR:
        return _make_offloading_connector(settings, config, worker)
    if settings.is_nixl:
        return _make_nixl_connector(settings, config, worker)
    return _load_connector(settings, worker)


def _make_nixl_connector(
    settings: KVTransferConfig, config: EngineConfig, worker: Worker
) -> NixlConnector:
    """Create the connector to NIXL. Raises `ConfigError`."""
    _check_full_attention(settings, worker)
    if (numerics := worker.read_numerics()) is None:
        raise ConfigError(
            f"{NIXL_CONNECTOR} needs weights that can be read for their digest.",
            param="kv_transfer_config",
        )
    try:
        return NixlConnector(
            block_identity(config, numerics, worker.loaded.max_model_len),
            worker.capacity.layout,
            config.block_size,
            saves=settings.saves,
            loads=settings.loads,
            **(NIXL_DEFAULTS | settings.kv_connector_extra_config),
        )
    except ImportError as error:
        raise ConfigError(
            f"{NIXL_CONNECTOR} needs the package nixl, which isn't installed or can't be "
            f"imported: {error}.",
            param="kv_transfer_config",
        ) from error


def _make_offloading_connector(
    settings: KVTransferConfig, config: EngineConfig, worker: Worker
) -> OffloadingConnector:
    offloads, swaps = config.kv_offloading_size > 0, config.swaps and not config.only_encodes
    if not (offloads or swaps):
        raise ConfigError(
            f"{OFFLOADING_CONNECTOR} needs a kv_offloading_size or swap_space above 0.",
            param="kv_offloading_size",
        )
    numerics = worker.read_numerics()
    if numerics is None:
        raise ConfigError(
            "kv_offloading_size needs weights that can be read for their digest.",
            param="kv_offloading_size",
        )
    layout = _local_layout(worker)
    buffers = BlockBuffers(_kv_caches(worker.loaded.model), layout)
    block_bytes = buffers.block_bytes
    host_bytes = _host_bytes(config, worker, block_bytes)
    host, storage = HostTier(host_bytes * block_bytes // buffers.host_block_bytes), None
    if (tier := _make_storage_tier(settings, config, block_bytes)) is not None:
        storage = StorageQueue(tier, host)
        if config.world_size > 1 and isinstance(tier, DiskTier):
            storage = RankedStorage(tier, host, config.world_size)
    identity = block_identity(config, numerics, worker.loaded.max_model_len)
    ec_connector = None
    if config.ec_transfer_config:
        ec_settings = ECTransferConfig.from_mapping(config.ec_transfer_config)
        ec_connector = ECConnector(
            host,
            storage,
            identity,
            block_bytes,
            worker.kernels.device,
            saves=ec_settings.saves,
            loads=ec_settings.loads,
        )
    return OffloadingConnector(
        host,
        config.block_size,
        identity,
        layout,
        storage=storage,
        ec_connector=ec_connector,
        saves=offloads and settings.saves and not config.only_encodes,
        loads=offloads and settings.loads and not config.only_encodes,
        # While a sequence's drafts are being verified, its state isn't that after its tokens.
        swaps=swaps and not (layout.state_group and config.speculative_config),
        max_in_flight=max(
            int(config.uses_async_scheduling(worker.supports_async_scheduling)),
            config.pipeline_parallel_size - 1,
        ),
        has_other_ranks=config.world_size > 1,
        verifies_early=config.world_size > 1
        or config.distributed_executor_backend == "external_launcher",
    )


def block_identity(config: EngineConfig, numerics: Numerics, max_model_len: int) -> bytes:
    """All that decides the first rank's part of a block but for its tokens, namespace, adapter and
    shape. How ranks share the model belongs to it: parts of other heads, tokens or layers may have
    the same shape.
    """
    num_stages, partition = config.pipeline_parallel_size, config.pipeline_layer_partition
    cut = [
        config.tensor_parallel_size,
        config.decode_context_parallel_size,
        num_stages,
        parse_partition(partition, num_stages) if partition and num_stages > 1 else (),
    ]
    return msgspec.json.encode([numerics, max_model_len, cut])


def _make_rank_connector(
    settings: KVTransferConfig, config: EngineConfig, worker: Worker
) -> RankConnector:
    """Create another rank's part of the first one's connector. Raises `ConfigError`."""
    layout = _local_layout(worker)
    block_bytes = BlockBuffers(_kv_caches(worker.loaded.model), layout).block_bytes
    host, storage = HostTier(_UNBOUNDED), None
    if (tier := _make_storage_tier(settings, config, block_bytes)) is not None:
        storage = StorageQueue(tier, host, _host_bytes(config, worker, block_bytes))
    return RankConnector(worker.rank, layout, host, storage)


def _host_bytes(config: EngineConfig, worker: Worker, block_bytes: int) -> int:
    """Capacity of a rank's tier in host memory: its own swap space, and its share of the memory
    tier that belongs to no storage, or of blocks that are written to one or read ahead. Stages have
    shares by their numbers of layers, so that the same number of blocks fits into each.
    """

    def share(num_bytes: int) -> int:
        if worker.stage is None:
            return num_bytes
        num_layers = len(_kv_caches(worker.loaded.model))
        return num_bytes * worker.stage.size * num_layers // worker.capacity.layout.num_layers

    swap_bytes = _gib(config.swap_space) if config.swaps else 0
    num_bytes = _gib(config.kv_offloading_size) // config.world_size
    if config.kv_offloading_backend == NATIVE:
        return share(swap_bytes + num_bytes)
    # More blocks could never be in the KV cache at once.
    return share(swap_bytes) + min(share(num_bytes), worker.capacity.num_blocks * block_bytes)


def _make_storage_tier(
    settings: KVTransferConfig, config: EngineConfig, block_bytes: int
) -> StorageTier | None:
    """The tier of a folder or URL; None: there is none. Raises `ConfigError`."""
    backend, capacity = config.kv_offloading_backend, _gib(config.kv_offloading_size)
    if backend == NATIVE or not capacity:
        return None
    if backend.startswith(f"{PEER_SCHEME}://"):
        return PeerTier(backend, capacity, block_bytes, serves=settings.saves)
    if "://" in backend:
        return RemoteTier(make_store(backend, capacity, block_bytes), capacity, block_bytes)
    return DiskTier(Path(backend).expanduser(), capacity, block_bytes)


def _kv_caches(model: Any) -> dict[str, tuple[Tensor, ...]]:
    tensors = model.kv_cache_tensors()
    layers = {f"layers.{index}": layer for index, layer in enumerate(tensors)}
    states = model.state_tensors() if isinstance(model, NativeDecoder) else ()
    return layers | ({"states": states} if states else {})


def _local_layout(worker: Worker) -> KVCacheConfig:
    """The KV cache groups of the layers that this worker has."""
    layout = worker.capacity.layout
    if worker.stage is None:
        return layout
    num_layers = len(_kv_caches(worker.loaded.model))
    return single_group_config(num_layers, layout.groups[0].window)


def _gib(size: float) -> int:
    return int(size * 2**30)


def _unsupported_reason(config: EngineConfig, worker: Worker) -> str:
    """Why a model's blocks can't be saved and loaded, as a message; "": they can."""
    loaded = worker.loaded
    name = loaded.spec.architecture
    if config.world_size > 1 and (reason := _ranks_reason(config, worker)):
        return reason
    if not worker.device.caches_prefixes:
        return f"the device {worker.device.name} caches no prefixes"
    if not hasattr(loaded.model, "kv_cache_tensors"):
        return f"{name} has no KV cache"
    if loaded.facts.pooling is not None and not loaded.facts.pooling.caches_prefixes:
        return f"results of {name} depend on hidden states of all tokens"
    if (config.speculative_config or {}).get("method") in HEADS:
        return "draft heads need hidden states of all blocks, which aren't saved"
    if isinstance(loaded.model, EncoderDecoder) and worker.drafts.of_model is not None:
        return "a draft model's keys and values of an encoder's states aren't saved"
    if loaded.facts.stateful and not loaded.facts.states_in_blocks:
        return f"sequences of {name} have states, which the Transformers bridge can't save"
    return ""


def _ranks_reason(config: EngineConfig, worker: Worker) -> str:
    """Why several ranks' blocks can't be saved and loaded, as a message; "": they can."""
    if worker.stage is not None and len(worker.capacity.layout.groups) > 1:
        return (
            f"each of {worker.stage.size} stages has other kinds of "
            f"{worker.loaded.spec.architecture}'s layers"
        )
    if config.distributed_executor_backend == "external_launcher":
        return "ranks of a launcher would find other blocks in their tiers"
    if config.ec_transfer_config:
        return "outputs of encoders can't be saved by several ranks (ec_transfer_config)"
    settings = KVTransferConfig.from_mapping(config.kv_transfer_config or {})
    if settings.kv_connector != OFFLOADING_CONNECTOR:
        return f"{config.world_size} ranks save blocks by {OFFLOADING_CONNECTOR} alone"
    if "://" in config.kv_offloading_backend:
        return f"{config.world_size} ranks save blocks in host memory or a folder alone"
    is_remote = config.nnodes > 1 or config.distributed_executor_backend == "ray"
    if is_remote and config.kv_offloading_backend != NATIVE:
        return "ranks on several machines have no folder in common"
    return ""


def _load_connector(settings: KVTransferConfig, worker: Worker) -> KVConnectorBase:
    """Create a connector of another package. Raises `ConfigError`."""
    module, name = settings.class_path
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        package = str(error.name).partition(".")[0]
        # A package that is there, and lacks the module alone, was imported.
        if isinstance(error, ModuleNotFoundError) and sys.modules.get(package) is None:
            raise ConfigError(
                f"kv_connector={settings.kv_connector!r} needs the package {package}, which isn't "
                "installed.",
                param="kv_transfer_config",
            ) from error
        raise ConfigError(
            f"kv_connector {module}.{name} can't be imported: {error}", param="kv_transfer_config"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, KVConnectorBase)):
        raise ConfigError(
            f"kv_connector {module}.{name} is no subclass of {KVConnectorBase.__module__}."
            f"{KVConnectorBase.__qualname__}.",
            param="kv_transfer_config",
        )
    _check_full_attention(settings, worker)
    return kind(worker.vllm_config, settings.kv_role, worker.capacity.layout)  # type: ignore[call-arg]


def _check_full_attention(settings: KVTransferConfig, worker: Worker) -> None:
    """Raise `ConfigError` if a model's blocks need the connector to the tiers."""
    if [group.kind for group in worker.capacity.layout.groups] != ["full"]:
        raise ConfigError(
            f"kv_connector={settings.kv_connector!r} can't be used: "
            f"{worker.loaded.spec.architecture} has sliding windows or states, which "
            f"{OFFLOADING_CONNECTOR} alone saves.",
            param="kv_transfer_config",
        )
