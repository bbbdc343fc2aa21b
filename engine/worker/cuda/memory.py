"""How many KV blocks a GPU has room for."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from engine.errors import ConfigError

log = logging.getLogger(__name__)

GRAPH_BYTES = 1 << 30
"""Kept free for CUDA graphs where they are used."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What a profiling run found, in bytes.

    Attributes:
        total: of the device.
        other: taken by other processes and by the driver's own needs.
        peak: the most that torch held in a step of full size, weights included.
    """

    total: int
    other: int
    peak: int


def num_gpu_blocks(
    memory: DeviceMemory, utilization: float, block_bytes: int, most: int, least: int, graphs: bool
) -> int:
    """Blocks of the KV pool: what is left of `utilization` of the device after a full step.

    Args:
        block_bytes: of one block over the layers that it holds.
        most: blocks that all sequences at full length could use.
        least: without which no sequence runs.

    Raises `ConfigError` when fewer than `least` fit.
    """
    kept = GRAPH_BYTES if graphs else 0
    space = int(memory.total * utilization) - memory.other - memory.peak - kept
    blocks = max(0, space) // block_bytes
    log.info(
        "GPU memory: %.1f GiB, %.1f for others, %.1f for a full step, %.1f for graphs, "
        "%.1f left at a utilization of %.2f: %d KV blocks",
        memory.total / GIB, memory.other / GIB, memory.peak / GIB, kept / GIB, space / GIB,
        utilization, blocks,
    )  # fmt: skip
    if blocks < least:
        raise ConfigError(
            f"{max(0, space)} bytes of GPU memory are left for the KV cache, which hold {blocks} "
            f"blocks of {block_bytes} bytes; this model needs at least {least}. Raise "
            f"gpu_memory_utilization ({utilization}), or lower max_num_batched_tokens.",
            param="gpu_memory_utilization",
        )
    return min(blocks, most)
