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
from engine.system.host import PREDECESSOR_VARIABLE, available_memory
from kernels import KernelSet

# Maps the pages of a pool's blocks, keys and values or states, before they are written.
#
# The system allocates and clears a cache's pages on their first write: 0.5 to 4 ms for a huge page,
# in the middle of a step for which streams wait. A checkpoint of all layers' states takes ten of
# them. A thread does it earlier, while no step is running: during one it would slow that step down
# as much.


log = logging.getLogger(__name__)

_MIB = 1 << 20
#: Bytes of each tensor that are mapped at a time: a huge page.
_CHUNK_BYTES = 2 * _MIB
#: Minimum pause after a step, as another one may follow.
_PAUSE_S = 0.2
#: A third of the default weight.
_NICE = 5


class PagePrefaulter:
    """Maps some memory beyond the highest block that was ever allocated.

    Blocks that were never used are allocated in the order of their ids, so these are used next.
    """

    def __init__(self, ops: KernelSet, caches: Iterable[Tensor], ahead: int) -> None:
        """`caches`: [num_blocks, ...] each; `ahead`: bytes to map ahead, over all caches."""
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

    def record_blocks(self, block_ids: Iterable[int]) -> None:
        """Called before a step with the blocks that were allocated for it."""
        self._noted_at = time.monotonic()
        highest = max(block_ids, default=-1)
        if highest + self._ahead >= self._requested:
            self._want(highest + 1 + self._ahead)

    def close(self, *, wait_s: float = 1.0) -> None:
        """Stop mapping, and release the caches once the thread has released them."""
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
    """Lower the calling thread's priority, but not to SCHED_IDLE.

    With SCHED_IDLE a busy machine gives it no time even to exit: a killed replica remains as a
    process, with its heartbeat and its memory, until the last of its threads has exited (100 s were
    measured). And it would hold the GIL for as long.
    """
    try:
        priority = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        # A process with a raised priority is lowered by `_NICE` only.
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

    `num_gpu_blocks_override` takes precedence, then `cpu_kvcache_space`; the default is a quarter
    of the free memory, and no less than the predecessor has, at most 4 GiB. Never more than all
    sequences at full length could use.

    Args:
        config: the settings.
        bytes_per_token: for the layers that a block holds.
        max_blocks_per_sequence: blocks of a sequence of full length.
        min_blocks: number of blocks below which no sequence can run, one per KV cache group.

    Raises `ConfigError` if fewer than `min_blocks` blocks fit.
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
    if config.cpu_kvcache_space is None and (tokens := os.environ.get(PREDECESSOR_VARIABLE)):
        # The predecessor may have had room for fewer or shorter sequences.
        space = max(space, min(int(tokens) * bytes_per_token, _DEFAULT_MAX_BYTES))
    blocks = space // (bytes_per_token * config.block_size)
    if blocks < min_blocks:
        raise ConfigError(
            f"{space} bytes of KV cache hold {blocks} blocks of {config.block_size} tokens "
            f"({bytes_per_token} bytes a token); this model needs at least {min_blocks}.",
            param="cpu_kvcache_space",
        )
    return min(blocks, config.max_num_seqs * max_blocks_per_sequence)


def kv_cache_space(config: EngineConfig) -> int:
    """Bytes for keys and values, and the same again for checkpoints of states."""
    if config.cpu_kvcache_space is not None:
        return int(config.cpu_kvcache_space * GIB)
    return min(available_memory() // 4, _DEFAULT_MAX_BYTES)


def max_states(state_bytes: int) -> int:
    """Number of sequences whose states fit into a quarter of the free memory; at least one."""
    return max(1, available_memory() // 4 // state_bytes)


def num_virtual_blocks(config: EngineConfig, token_budget: int) -> int:
    """Blocks for a model without a KV cache: they use no memory, the scheduler only counts them.

    Enough for two steps, since one may be planned while another runs.
    """
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    return 2 * (-(-token_budget // config.block_size) + config.max_num_seqs)
