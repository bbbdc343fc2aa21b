"""`CpuRankGroup`: ranks that gather through shared memory or an exchange."""

from __future__ import annotations

import ctypes
import logging
import mmap
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpu.library import INTERRUPTED, Library, check, check_dense
from kernels.cpu.linear import CpuLinear
from kernels.cpu.memory import num_threads
from kernels.errors import RankTimeout
from kernels.interface import LinearLayer, RankGroup
from kernels.ranks import Exchange

log = logging.getLogger(__name__)

#: Bytes of a slot, of which each rank has two. Larger data are gathered in several rounds.
SLOT_BYTES = 4 << 20
#: Tokens of a tile of attention, `kTile` in attention.h. Ranks have whole ones, so that each is
#: computed by one rank, with the bits that it has without ranks.
KV_TOKENS = 128


def shared_bytes(library: Library, size: int) -> int:
    """Return the bytes of memory that `size` ranks share."""
    return library.ranks_bytes(size, SLOT_BYTES)


class CpuRankGroup(RankGroup):
    """A rank's view of the group; owns the shared memory while layers may use it."""

    def __init__(
        self,
        library: Library,
        memory: mmap.mmap,
        rank: int,
        size: int,
        timeout_s: float,
        exchange: Exchange | None = None,
    ) -> None:
        """Raises ValueError unless 0 <= rank < size <= 64, and `memory` is large enough."""
        if len(memory) < shared_bytes(library, size):
            raise ValueError(f"{size} ranks share {shared_bytes(library, size)} bytes")
        self.rank, self.size = rank, size
        self._library, self._memory = library, ctypes.c_char.from_buffer(memory)
        address, timeout_ms = ctypes.addressof(self._memory), round(timeout_s * 1000)
        self._exchange = exchange
        #: Referenced here, since the library calls it during the group's life.
        self._callback = None if exchange is None else _callback(exchange, size)
        function = self._callback and ctypes.cast(self._callback, ctypes.c_void_p)
        handle = library.ranks_new(address, rank, size, SLOT_BYTES, timeout_ms, function)
        if not handle:
            raise ValueError(f"there is no rank {rank} of {size}; there may be at most 64")
        self.handle = handle
        weakref.finalize(self, library.ranks_free, handle).atexit = False  # as in `CpuLinear`

    @property
    def num_gathers(self) -> int:
        return self._library.ranks_gathers(self.handle)

    @property
    def missing_rank(self) -> int | None:
        rank = self._library.ranks_missing(self.handle)
        return None if rank < 0 else rank

    def shard_linear(
        self, layer: LinearLayer, outputs: Sequence[int], inputs: Sequence[int] | None = None
    ) -> None:
        if not isinstance(layer, CpuLinear):
            raise ValueError("only layers of the compiled CPU kernels are shared by ranks")
        first, end = outputs[self.rank], outputs[self.rank + 1]
        if layer.out_features != end - first:
            raise ValueError(f"the layer has {layer.out_features} rows, not {end - first}")
        if inputs is not None and layer.in_features != inputs[-1]:
            raise ValueError(f"the layer has {layer.in_features} inputs, not {inputs[-1]}")
        status = self._library.shard_linear(
            layer.handle,
            self.handle,
            _starts(outputs),
            None if inputs is None else _starts(inputs),
        )
        if status:
            check(status)
        layer.ranks, layer.out_features = self, outputs[-1]
        if inputs is not None:
            layer.in_features = inputs[self.rank + 1] - inputs[self.rank]

    def gather(self, local: Tensor, starts: Sequence[int]) -> Tensor:
        width = starts[self.rank + 1] - starts[self.rank]
        check_dense("local", local, (len(local), width), torch.float32)
        out = torch.empty((len(local), starts[-1]))
        status = self._library.ranks_gather(
            self.handle, out.data_ptr(), local.data_ptr(), len(local), _starts(starts),
            num_threads(),
        )  # fmt: skip
        if status:
            check(status)
        return out

    def listen(self) -> bool:
        status = self._library.ranks_listen(self.handle)
        if status not in (0, INTERRUPTED):
            check(status)
        return status == 0

    def interrupt(self) -> None:
        self._library.ranks_interrupt(self.handle)

    def fail(self) -> None:
        self._library.ranks_fail(self.handle)

    @property
    def waited_s(self) -> float:
        return self._library.ranks_waited_ns(self.handle) / 1e9

    def reset(self) -> None:
        self._library.ranks_reset(self.handle)
        if self._exchange is not None:
            self._exchange.reset()

    def forget_failure(self) -> None:
        self._library.ranks_forget_failure(self.handle)


def address_of_kv_ranks(ranks: RankGroup | None, block_size: int) -> int | None:
    """Return the address of the group whose ranks each have `block_size` tokens of a block. Raises
    ValueError for other kernels' groups, and for parts that tiles of attention would cross.
    """
    if ranks is None:
        return None
    if not isinstance(ranks, CpuRankGroup) or block_size % KV_TOKENS:
        raise ValueError(f"ranks of these kernels have {KV_TOKENS} tokens of a block each")
    return ranks.handle


def _callback(exchange: Exchange, size: int) -> ctypes._FuncPointer:
    """Return the callback for `RankGroup::Exchange` in ranks.h.

    An exception can't cross the C library, so it is logged, and the returned number makes the group
    fail.
    """

    def run(slots: int, floats: int) -> int:
        buffers = [
            (ctypes.c_float * floats).from_address(slots + rank * SLOT_BYTES)
            for rank in range(size)
        ]
        try:
            exchange.exchange([torch.frombuffer(buffer, dtype=torch.float32) for buffer in buffers])
        except RankTimeout as error:
            return error.rank
        except Exception:
            log.warning("Ranks can't exchange what they have computed", exc_info=True)
            return size
        return -1

    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int64)(run)


def _starts(starts: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(starts))(*starts)
