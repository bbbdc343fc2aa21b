"""Estimating a model's memory before it is loaded, and comparing it with this machine's."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from catalog.checkpoint import BITS, Checkpoint
from engine.contract.engine_config import EngineConfig
from engine.system.host import available_memory

#: Bits per value, scales included, of layers' weights quantized while loading, and of embedding
#: tables; None: tables keep their dtype.
ROUNDED_BITS = {
    "int8": (8.125, 8.125),
    "int4": (4.5, 8.125),
    "fp8": (8.25, None),
    "bitsandbytes": (4.5, None),
}
#: Peak memory of loading, relative to the weights' final size: docs/quantization.md.
LOAD_PEAK_FACTOR = 1.15
#: Memory of an empty replica process: Python, torch, the kernels.
PROCESS_BYTES = 600 << 20
#: Default share of free memory for the KV cache, and its upper limit.
KV_FRACTION_DIVISOR, MAX_DEFAULT_KV_BYTES = 4, 4 << 30
_KV_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "half": 16, "float": 32, "int8": 8}
_KV_BITS |= {"fp8": 8, "fp8_e4m3": 8, "fp8_e5m2": 8, "F32": 32, "F16": 16, "BF16": 16, "F64": 64}


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated sizes in bytes.

    Attributes:
        weights: after loading. kv_per_token: over all layers, None if unknown.
        context, sequences: as requested; kv: for that many sequences of that length.
        kv_pool: size of the KV cache by the settings; None: the same as `kv`.
        full_sequences: number of full-length sequences that fit the pool, None if unknown.
        max_num_seqs: maximum number of running sequences, by the settings.
        num_ranks: processes of a replica on a machine, which share weights and KV cache.
        total: the sum, including the processes themselves and the peak while loading.
        available: on this host; fits: whether that is enough.
    """

    weights: int
    kv_per_token: int | None
    context: int
    sequences: int
    kv: int
    kv_pool: int
    full_sequences: float | None
    max_num_seqs: int
    num_ranks: int
    total: int
    available: int
    host: str

    @property
    def per_rank(self) -> int:
        """Share of `total` per process."""
        return self.total // self.num_ranks

    @property
    def fits(self) -> bool:
        """Whether this machine has enough memory now."""
        return self.total <= self.available


def fits_memory(weight_nbytes: int) -> bool:
    """Whether this machine has the memory to load weights of this size now, without a KV cache."""
    return weight_nbytes * LOAD_PEAK_FACTOR + PROCESS_BYTES <= available_memory()


def estimate_memory(
    checkpoint: Checkpoint,
    settings: Mapping[str, Any],
    *,
    sequences: int = 1,
    context: int = 0,
    predecessor_tokens: int = 0,
) -> MemoryEstimate:
    """Estimate the memory of a replica with these settings.

    Args:
        settings: of `EngineConfig`; irrelevant ones are ignored.
        context: tokens per sequence; 0: the maximum that is served.
        predecessor_tokens: size of a predecessor's KV cache, than which that of the replica is no
            smaller unless its size is configured.
    """
    config = EngineConfig.from_mapping(dict(settings))
    weights = weight_bytes(checkpoint, config)
    shape, free = checkpoint.shape, available_memory()
    longest = config.max_model_len or (shape.context if shape else 0)
    context = min(context, longest) if context and longest else context or longest
    per_token = None if shape is None else kv_bytes_per_token(checkpoint, config)
    kv = 0 if per_token is None else sequences * sequence_bytes(checkpoint, config, context)
    pool = _free_kv_bytes(config, per_token, free)
    configured = _configured_kv_bytes(config, per_token)
    min_bytes = min(predecessor_tokens * (per_token or 0), MAX_DEFAULT_KV_BYTES)
    share = config.ranks_per_node / config.world_size
    full = None
    if per_token is not None and context:
        full = pool / max(1, sequence_bytes(checkpoint, config, context))
    # Of a prompt each rank gathers a layer's keys and values.
    gathered = 0
    if config.deals_tokens and shape is not None and per_token is not None:
        gathered = context * per_token // shape.layers
    return MemoryEstimate(
        weights=weights,
        kv_per_token=per_token,
        context=context,
        sequences=sequences,
        kv=kv,
        kv_pool=pool,
        full_sequences=full,
        max_num_seqs=config.max_num_seqs,
        num_ranks=config.ranks_per_node,
        total=int(
            share
            * max(
                weights * LOAD_PEAK_FACTOR,
                weights + max(kv, configured or min_bytes),
            )
        )
        + config.ranks_per_node * (PROCESS_BYTES + gathered),
        available=free,
        host=socket.gethostname(),
    )


def weight_bytes(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """Bytes of the weights in memory, in the dtype that they are loaded in."""
    floats = checkpoint.matrix_values + checkpoint.table_values
    if not floats or checkpoint.quantization:
        # Quantized already, or of an unknown form.
        return int(checkpoint.nbytes * _loaded_share(checkpoint, config))
    stored_bits = BITS.get(checkpoint.dtype, 16)
    rest = checkpoint.nbytes - floats * stored_bits // 8
    loaded_bits = _KV_BITS.get(config.dtype, stored_bits)
    if config.model_impl != "transformers":  # a float32 model keeps 16-bit weights as they are
        loaded_bits = min(stored_bits, loaded_bits)
    matrix_bits, table_bits = ROUNDED_BITS.get(config.quantization or "", (loaded_bits, None))
    table_bits = table_bits or loaded_bits
    values = checkpoint.matrix_values * matrix_bits + checkpoint.table_values * table_bits
    return int((values / 8 + rest) * _loaded_share(checkpoint, config))


def _loaded_share(checkpoint: Checkpoint, config: EngineConfig) -> float:
    """Share of the weights that a replica loads: some of the experts, where it shares them."""
    if not config.shares_experts:
        return 1.0
    elsewhere = checkpoint.expert_nbytes * (1 - 1 / config.data_parallel_size)
    return 1.0 - elsewhere / max(1, checkpoint.nbytes)


def kv_bytes_per_token(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """KV bytes per token over all layers; 8-bit integers have a scale per head."""
    shape = checkpoint.shape
    if shape is None:
        return 0
    model_dtype = checkpoint.dtype if config.dtype == "auto" else config.dtype
    name = model_dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    size = shape.values_per_token * _KV_BITS.get(name, 16) // 8
    return size + shape.values_per_token // shape.head_dim * 4 if name == "int8" else size


def sequence_bytes(checkpoint: Checkpoint, config: EngineConfig, tokens: int) -> int:
    """KV cache bytes of one sequence: whole blocks, limited by the sliding window if any."""
    shape, block = checkpoint.shape, config.block_size
    if shape is None or not tokens:
        return 0
    per_layer = kv_bytes_per_token(checkpoint, config) / shape.layers
    full_blocks = -(-tokens // block)
    hybrid = not (config.disable_hybrid_kv_cache_manager or config.disable_sliding_window)
    blocks = sum(
        full_blocks if not window or not hybrid else min(full_blocks, -(-window // block) + 1)
        for window in shape.windows
    )
    return int(blocks * block * per_layer)


def _configured_kv_bytes(config: EngineConfig, per_token: int | None) -> int:
    """KV cache size that the settings specify; 0 if the engine decides."""
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override * config.block_size * (per_token or 0)
    if config.cpu_kvcache_space is not None:
        return int(config.cpu_kvcache_space * (1 << 30))
    return 0


def _free_kv_bytes(config: EngineConfig, per_token: int | None, free: int) -> int:
    return _configured_kv_bytes(config, per_token) or min(
        free // KV_FRACTION_DIVISOR, MAX_DEFAULT_KV_BYTES
    )
