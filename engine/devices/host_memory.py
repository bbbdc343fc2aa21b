"""The number of KV blocks of a replica, from the host's memory."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable

from torch import Tensor

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.devices.threads import JoinedThread
from engine.scheduler.plan import StepPlan
from engine.system.host import available_memory
from kernels import KernelSet

# Maps the pages of a KV cache before its blocks are written.
#
# A cache's memory is taken when it's first written, and the system clears each page then: 0.5 to
# 4 ms for a huge page, in the middle of a step for which streams wait. A thread does it before,
# while no step is run: beside one it would cost that step as much.


log = logging.getLogger(__name__)

_MIB = 1 << 20
#: Bytes of each tensor that are mapped at a time: a huge page.
_CHUNK_BYTES = 2 * _MIB
#: A step may follow another one so soon.
_PAUSE_S = 0.2
#: A third of what others get.
_NICE = 5


class PagePrefaulter:
    """Keeps some memory mapped beyond the highest block that was ever handed out.

    Blocks that were never used go in the order of their ids, so what is beyond is used next.
    """

    def __init__(self, ops: KernelSet, caches: Iterable[Tensor], ahead: int) -> None:
        """`caches`: [num_blocks, ...] each; `ahead`: bytes of them, all together."""
        self._ops, self._caches = ops, list(caches)
        self._num_blocks = min((len(cache) for cache in self._caches), default=0)
        block_bytes = [cache.nbytes // len(cache) for cache in self._caches if len(cache)]
        self._ahead = ahead // max(1, sum(block_bytes))
        self._chunk_blocks = max(1, _CHUNK_BYTES // max(block_bytes, default=_CHUNK_BYTES))
        self._mapped = self._requested = 0
        self._noted_at = 0.0
        self._wake = threading.Event()
        self._closed = False
        self._thread = JoinedThread(self._run, name="kv-pages", tell_end=self._tell_end)
        self._want(self._ahead)
        self._thread.start()

    def record_blocks(self, plan: StepPlan) -> None:
        """A step is about to be run, for which blocks were handed out."""
        self._noted_at = time.monotonic()
        tables = [new.block_ids for new in plan.new]
        tables += [table for _, table in plan.new_blocks]
        highest = max((block for groups in tables for ids in groups for block in ids), default=-1)
        if highest + self._ahead >= self._requested:
            self._want(highest + 1 + self._ahead)

    def close(self, *, wait_s: float = 1.0) -> None:
        """Map no more, and let the caches go once the thread does."""
        self._tell_end()
        self._thread.join(wait_s)
        self._caches = []

    def _tell_end(self) -> None:
        self._closed = True
        self._wake.set()

    def _want(self, blocks: int) -> None:
        blocks = min(blocks, self._num_blocks)
        if blocks > self._requested:
            self._requested = blocks
            self._wake.set()

    def _run(self) -> None:
        _lower_priority()
        while not self._closed:
            self._wake.wait()
            self._wake.clear()
            while self._mapped < self._requested and not self._closed:
                self._map_chunk()
            if self._mapped == self._num_blocks:
                return

    def _map_chunk(self) -> None:
        last = min(self._mapped + self._chunk_blocks, self._requested)
        for cache in self._caches:
            while time.monotonic() - self._noted_at < _PAUSE_S and not self._closed:
                time.sleep(_PAUSE_S)
            if self._closed:
                return
            self._ops.map_pages(cache[self._mapped : last])
        self._mapped = last


def _lower_priority() -> None:
    """Give other threads some precedence over the calling one; not all of it.

    With SCHED_IDLE a busy machine leaves it no time even to die: a killed replica is a process,
    with its heartbeat and its memory, until the last of its threads has ended (100 s were seen).
    And it would hold Python's lock for as long.
    """
    try:
        priority = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        # Of a process with precedence over others only so much less.
        nice = min(priority + _NICE, max(priority, _NICE))
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
    except OSError as error:
        log.debug("KV pages are mapped at a normal priority (%s)", error)


GIB = 1 << 30
_DEFAULT_MAX_BYTES = 4 * GIB


def num_cpu_blocks(
    config: EngineConfig, bytes_per_token: int, max_blocks_per_sequence: int, min_blocks: int = 1
) -> int:
    """Blocks of the KV pool on a CPU.

    `num_gpu_blocks_override` decides when it's set, then `cpu_kvcache_space`; by default a quarter
    of the free memory, at most 4 GiB. Never more than all sequences at full length could use.

    Args:
        config: the settings.
        bytes_per_token: of the layers that a block holds.
        max_blocks_per_sequence: blocks that a sequence of full length takes.
        min_blocks: blocks without which no sequence runs at all, one a KV cache group.

    Raises `ConfigError` when fewer than `min_blocks` blocks fit.
    """
    if config.num_gpu_blocks_override is not None:
        if config.num_gpu_blocks_override < min_blocks:
            raise ConfigError(
                f"num_gpu_blocks_override must be at least {min_blocks} for this model, one block "
                f"for each of its KV cache groups; got {config.num_gpu_blocks_override}.",
                param="num_gpu_blocks_override",
            )
        return config.num_gpu_blocks_override
    space = kv_cache_space(config)
    blocks = space // (bytes_per_token * config.block_size)
    if blocks < min_blocks:
        raise ConfigError(
            f"{space} bytes of KV cache hold {blocks} blocks of {config.block_size} tokens "
            f"({bytes_per_token} bytes a token); this model needs at least {min_blocks}.",
            param="cpu_kvcache_space",
        )
    return min(blocks, config.max_num_seqs * max_blocks_per_sequence)


def kv_cache_space(config: EngineConfig) -> int:
    """Bytes for keys and values, and as many for checkpoints of states."""
    if config.cpu_kvcache_space is not None:
        return int(config.cpu_kvcache_space * GIB)
    return min(available_memory() // 4, _DEFAULT_MAX_BYTES)


def max_states(state_bytes: int) -> int:
    """Sequences whose states fit into a quarter of the free memory; at least one."""
    return max(1, available_memory() // 4 // state_bytes)


def num_virtual_blocks(config: EngineConfig, token_budget: int) -> int:
    """Blocks for a model without a KV cache: they take no memory, the scheduler only counts them.

    Enough for two steps, since one may be planned while another runs.
    """
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    return 2 * (-(-token_budget // config.block_size) + config.max_num_seqs)
