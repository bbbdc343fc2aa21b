"""The number of KV blocks for which a GPU has memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.contract.errors import ConfigError

log = logging.getLogger(__name__)

GIB = 1 << 30
GRAPH_SLACK = 1.25
"""Safety factor over the measured size of a few graphs: others may differ."""


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Result of a profiling run, in bytes.

    Attributes:
        total: of the device.
        other: used by other processes and by the driver.
        peak: peak of torch's allocator in a full-size step: weights, activations, sampling, and
            unused memory between them.
        graphs: what CUDA graphs will need, including their buffers.
    """

    total: int
    other: int
    peak: int
    graphs: int = 0


class MemoryMeter(Protocol):
    """A device's memory as torch's allocator sees it, in bytes."""

    def begin(self) -> None:
        """Release unused memory, and start to measure the peak."""

    def reserved(self) -> int:
        """Bytes that the allocator holds now, used or unused."""

    def peak(self) -> int:
        """Peak of the bytes that it held since `begin`."""

    def device(self) -> tuple[int, int]:
        """(free, total) bytes of the device, including other processes."""


def graph_bytes(costs: Sequence[int], count: int) -> int:
    """Bytes that `count` graphs will need, from the sizes of the first few, largest first.

    The first includes the memory pool that all share; each of the others costs about as much as the
    last measured one.
    """
    if not costs:
        return 0
    return int((sum(costs) + costs[-1] * max(0, count - len(costs))) * GRAPH_SLACK)


def num_gpu_blocks(
    memory: MemoryProfile, utilization: float, block_bytes: int, max_blocks: int, min_blocks: int,
    reserved_bytes: int = 0,
) -> int:  # fmt: skip
    """Blocks of the KV pool: what a full-size step leaves of `utilization` of the device.

    Args:
        block_bytes: bytes of one block over the layers that it holds.
        max_blocks: number of blocks that all sequences could use at full length.
        min_blocks: number of blocks below which no sequence can run.
        reserved_bytes: bytes for adapters and a draft model's cache.

    Raises `ConfigError` if fewer than `min_blocks` fit.
    """
    extra_bytes = memory.graphs + reserved_bytes
    space = int(memory.total * utilization) - memory.other - memory.peak - extra_bytes
    blocks = max(0, space) // block_bytes
    log.info(
        "GPU memory: %.1f GiB, %.1f for others, %.1f for a full step, %.1f for graphs and "
        "adapters, %.1f left at a utilization of %.2f: %d KV blocks",
        memory.total / GIB, memory.other / GIB, memory.peak / GIB, extra_bytes / GIB, space / GIB,
        utilization, blocks,
    )  # fmt: skip
    if blocks < min_blocks:
        raise ConfigError(
            f"{max(0, space)} bytes of GPU memory are left for the KV cache, which hold {blocks} "
            f"blocks of {block_bytes} bytes; this model needs at least {min_blocks}. Raise "
            f"gpu_memory_utilization ({utilization}), or lower max_num_batched_tokens.",
            param="gpu_memory_utilization",
        )
    return min(blocks, max_blocks)
