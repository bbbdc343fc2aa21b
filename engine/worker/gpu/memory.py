"""How many KV blocks a GPU has room for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.contract.errors import ConfigError

log = logging.getLogger(__name__)

GIB = 1 << 30
GRAPH_SLACK = 1.25
"""Over what a few graphs took: others may be less alike."""


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """What a profiling run found, in bytes.

    Attributes:
        total: of the device.
        other: taken by other processes and by the driver's own needs.
        peak: the most that torch's allocator held in a step of full size: weights, activations,
            what sampling needs, and what lies idle between them.
        graphs: what CUDA graphs will take, their buffers included.
    """

    total: int
    other: int
    peak: int
    graphs: int = 0


class MemoryMeter(Protocol):
    """A device's memory as torch's allocator sees it, in bytes."""

    def begin(self) -> None:
        """Give back what lies idle, and begin to watch for the peak."""

    def reserved(self) -> int:
        """What the allocator holds now, used or idle."""

    def peak(self) -> int:
        """The most that it held since `begin`."""

    def device(self) -> tuple[int, int]:
        """(free, total) of the device, whoever uses it."""


def graph_bytes(costs: Sequence[int], count: int) -> int:
    """What `count` graphs will take, by what the first few took, the largest first.

    The first brings the memory pool that all share; each of the others costs about what the last
    one that was measured did.
    """
    if not costs:
        return 0
    return int((sum(costs) + costs[-1] * max(0, count - len(costs))) * GRAPH_SLACK)


def num_gpu_blocks(
    memory: MemoryProfile, utilization: float, block_bytes: int, max_blocks: int, min_blocks: int,
    reserved_bytes: int = 0,
) -> int:  # fmt: skip
    """Blocks of the KV pool: what is left of `utilization` of the device after a full step.

    Args:
        block_bytes: of one block over the layers that it holds.
        max_blocks: blocks that all sequences at full length could use.
        min_blocks: without which no sequence runs.
        reserved_bytes: bytes that are left to adapters and to a draft model's cache.

    Raises `ConfigError` when fewer than `min_blocks` fit.
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
