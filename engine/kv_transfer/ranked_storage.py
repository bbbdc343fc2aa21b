"""`RankedStorage`: blocks in a folder, of which each rank of a model has a part.

The first rank finds blocks and has the others read their parts before a step is planned with them:
a step can't do without. It knows what parts are written from the folder, which all ranks share.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from engine.distributed.channel import Channel, ChannelClosed, encode_frame
from engine.kv_transfer.block_buffers import Payload
from engine.kv_transfer.disk_tier import DiskTier
from engine.kv_transfer.host_tier import HostTier
from engine.kv_transfer.storage_queue import CLOSE_TIMEOUT_S, READ_TIMEOUT_S, StorageQueue

_POLL_S = 60.0


class ReadParts(msgspec.Struct, tag=True):
    """Asks a rank to read its parts of a tenant's blocks into host memory, in a sequence's order.

    After `timeout_s` it begins no further one.
    """

    number: int
    keys: list[bytes]
    tenant: str
    namespace: str
    timeout_s: float


class FlushParts(msgspec.Struct, tag=True):
    """Asks a rank to write its parts of the blocks that steps up to `step` save."""

    number: int
    step: int
    timeout_s: float


class PartsReply(msgspec.Struct):
    """A rank's reply to either.

    Attributes:
        num_read: number of the first blocks whose parts are in host memory now.
        is_lost: whether the storage has no usable part of the block after them.
        is_written: whether everything is written.
        failures: unusable parts since the start, by reason.
    """

    number: int
    num_read: int = 0
    is_lost: bool = False
    is_written: bool = False
    failures: dict[str, int] = {}


def part_key(key: bytes, rank: int) -> bytes:
    """Key of another rank's part of a block of which the first rank's part has this key."""
    # A block's later payloads have keys of its first one's and a number (`BlockKeys.of_block`).
    return hashlib.sha256(key + b"rank" + rank.to_bytes(4, "little")).digest()


class _Call:
    """A call of all other ranks. Attributes: replies: by rank; keys: of the blocks to read."""

    def __init__(self, number: int, keys: Sequence[bytes], num_ranks: int) -> None:
        self.number, self.keys, self.replies = number, keys, dict[int, PartsReply]()
        #: Ranks that haven't replied, and this one.
        self.num_pending = num_ranks + 1
        self.replied = threading.Event()


class RankedStorage(StorageQueue):
    """The first rank's `StorageQueue`: a block is there if the parts of all ranks are.

    The other ranks have in host memory what this one has, as they are told by plans. A plan must
    not have them remove what they are reading: see `num_calls` and `is_being_read`.

    Attributes:
        num_calls: number of the last call of the other ranks.
        saved_step: the last step whose blocks were saved.
    """

    def __init__(self, tier: DiskTier, host: HostTier, num_ranks: int) -> None:
        """`num_ranks`: that the model has."""
        super().__init__(tier, host)
        self._index, self._ranks, self.num_parts = tier, range(1, num_ranks), num_ranks
        self._channels: Sequence[Channel] = ()
        self.num_calls, self.saved_step = 0, 0
        self._calls: dict[int, _Call] = {}
        self._num_being_read: Counter[bytes] = Counter()
        self._failures: dict[int, Counter[str]] = {}
        self._calls_lock = threading.Lock()
        self._current = threading.local()

    def connect(self, channels: Sequence[Channel]) -> None:
        """Use the channels to the other ranks, in their order."""
        self._channels = channels
        for rank, channel in zip(self._ranks, channels, strict=True):
            threading.Thread(
                target=self._receive, args=(rank, channel), name="kv-parts", daemon=True
            ).start()

    def __contains__(self, key: bytes) -> bool:
        return super().__contains__(key) and self._has_other_parts(key)

    def may_contain(self, key: bytes) -> bool:
        return super().may_contain(key) and self._has_other_parts(key)

    def _has_other_parts(self, key: bytes) -> bool:
        return all(part_key(key, rank) in self._index for rank in self._ranks)

    def is_saved(self, key: bytes) -> bool:
        # All ranks put into host memory what a plan saves: none knows which parts others lack.
        return key in self._host and super().__contains__(key)

    def is_being_read(self, key: bytes) -> bool:
        """Whether ranks are reading their parts of a block; False once it's in host memory."""
        return key in self._num_being_read

    @property
    def failures(self) -> Counter[str]:
        """Those of all ranks; of others what they last replied. They are asked again."""
        with self._calls_lock:
            is_asked = any(not call.keys for call in self._calls.values())
        if not is_asked:
            self._end(self._ask(lambda number: ReadParts(number, [], "", "", 0.0), ()))
        return sum(self._failures.copy().values(), super().failures)

    def _ask(
        self, make_message: Callable[[int], ReadParts | FlushParts], keys: Sequence[bytes]
    ) -> _Call:
        """Send all ranks a message with the number of the call, which ends with `_end`."""
        with self._calls_lock:
            # First: a plan that knows the number must know the keys.
            self._num_being_read.update(keys)
            self.num_calls += 1
            call = self._calls[self.num_calls] = _Call(self.num_calls, keys, len(self._channels))
        if not self._channels:
            call.replied.set()
        frame = encode_frame(make_message(call.number))
        for rank, channel in enumerate(self._channels, 1):
            try:
                channel.send(frame)
            except ChannelClosed:
                self._on_reply(rank, PartsReply(call.number))
        return call

    def _receive(self, rank: int, channel: Channel) -> None:
        try:
            while True:
                if (data := channel.receive(_POLL_S)) is not None:
                    self._on_reply(rank, msgspec.msgpack.decode(data, type=PartsReply))
        except ChannelClosed:
            with self._calls_lock:
                numbers = list(self._calls)
            for number in numbers:
                self._on_reply(rank, PartsReply(number))

    def _on_reply(self, rank: int, reply: PartsReply) -> None:
        if reply.failures:
            self._failures[rank] = Counter(reply.failures)
        with self._calls_lock:
            call = self._calls.get(reply.number)
            if call is None or rank in call.replies:
                return
            call.replies[rank] = reply
        if reply.is_lost and reply.num_read < len(call.keys):
            # So that it's written again.
            self._index.forget(part_key(call.keys[reply.num_read], rank))
        if len(call.replies) == len(self._channels):
            call.replied.set()
        self._end(call)

    def _end(self, call: _Call) -> None:
        """A rank is done with a call. After the last one the other ranks remove what this one
        doesn't have.
        """
        with self._calls_lock:
            call.num_pending -= 1
            if call.num_pending:
                return
            del self._calls[call.number]
            self._num_being_read -= Counter(call.keys)
        for key in call.keys:
            if key not in self._host:
                self._host.on_removed(key)

    def _read(
        self,
        keys: Sequence[bytes] | Callable[[], Sequence[bytes]],
        tenant: str,
        namespace: str,
        source: str,
        deadline: float,
        refresh: bool,
        more: Callable[[Payload], Sequence[bytes]] | None,
    ) -> None:
        names = list(keys() if callable(keys) else keys)
        timeout_s = max(0.0, deadline - time.monotonic())
        call = self._current.call = self._ask(
            lambda number: ReadParts(number, names, tenant, namespace, timeout_s), names
        )
        try:
            super()._read(names, tenant, namespace, source, deadline, refresh, more)
        finally:
            self._end(call)

    def _read_blocks(
        self, tenant: str, namespace: str, source: str, deadline: float, keys: Sequence[bytes]
    ) -> list[tuple[bytes, Payload]]:
        blocks = super()._read_blocks(tenant, namespace, source, deadline, keys)
        call: _Call = self._current.call
        if not call.replied.wait(READ_TIMEOUT_S):
            return []
        return blocks[: min((reply.num_read for reply in call.replies.values()), default=0)]

    def flush(self, timeout_s: float | None = None) -> None:
        call = self._flush_other_ranks(READ_TIMEOUT_S if timeout_s is None else timeout_s)
        super().flush(timeout_s)
        call.replied.wait(timeout_s)
        if not call.replied.is_set() or not all(r.is_written for r in call.replies.values()):
            raise TimeoutError("Other ranks haven't written their parts.")

    def _flush_other_ranks(self, timeout_s: float) -> _Call:
        step = self.saved_step
        call = self._ask(lambda number: FlushParts(number, step, timeout_s), ())
        self._end(call)
        return call

    def close(self) -> None:
        closes_at = time.monotonic() + CLOSE_TIMEOUT_S
        call = self._flush_other_ranks(CLOSE_TIMEOUT_S)
        super().close()
        call.replied.wait(max(0.0, closes_at - time.monotonic()))
        for channel in self._channels:
            channel.shutdown()
