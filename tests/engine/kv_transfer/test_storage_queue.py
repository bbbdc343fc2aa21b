"""Blocks on their way to a storage and from it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from engine.kv_transfer.block_buffers import Payload
from engine.kv_transfer.host_tier import HostTier
from engine.kv_transfer.storage_queue import NUM_READERS, StorageQueue
from engine.kv_transfer.storage_tier import StorageTier

NUM_BLOCKS = 20


class SlowTier(StorageTier):
    """Its first write takes until `proceed` is set."""

    name = "slow"

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.began, self.proceed = threading.Event(), threading.Event()
        self.written: list[bytes] = []
        self.followed: list[list[bytes]] = []

    @property
    def digest(self) -> bytes:
        return b""

    def __contains__(self, key: bytes) -> bool:
        return key in self.written

    def may_contain(self, key: bytes) -> bool:
        return key in self.written

    def read(self, key: bytes, namespace: str, tenant: str = "") -> Payload | None:
        return None

    def follow_sequence(
        self, keys: Sequence[bytes], namespace: str, source: str, is_computed: Callable[[], bool]
    ) -> Iterator[Payload]:
        self.followed.append(list(keys))
        for key in keys:
            while not self.proceed.wait(0.01):
                if not is_computed():
                    return
            yield np.frombuffer(key, np.uint8)

    def write(self, key: bytes, payload: Payload, namespace: str, tenant: str = "") -> bool:
        self.began.set()
        self.proceed.wait(60)
        self.written.append(key)
        return True

    def measure_read(self) -> float:
        return 0.0


@pytest.fixture
def tier() -> Iterator[SlowTier]:
    tier = SlowTier()
    yield tier
    tier.proceed.set()


def queue_of(tier: SlowTier) -> tuple[StorageQueue, list[bytes]]:
    """A queue that is at the first of some blocks, and their keys."""
    queue = StorageQueue(tier, HostTier(1 << 20))
    keys = [bytes([number]) * 32 for number in range(NUM_BLOCKS)]
    queue.queue_writes([(key, np.zeros(10, np.uint8)) for key in keys], "n")
    assert tier.began.wait(60)
    return queue, keys


def close_concurrently(queue: StorageQueue, tier: SlowTier) -> None:
    """Close a queue, whose first write goes on when that has begun."""
    closing = threading.Thread(target=queue.close)
    closing.start()
    while not queue._writer._shutdown:
        pass
    tier.proceed.set()
    closing.join(60)
    assert not closing.is_alive()


def test_what_waits_is_written_before_a_replica_ends(
    tier: SlowTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.kv_transfer.storage_queue.CLOSE_TIMEOUT_S", 600.0)
    queue, keys = queue_of(tier)
    close_concurrently(queue, tier)
    assert tier.written == keys


def test_a_replica_that_ends_does_not_wait_for_a_slow_storage(
    tier: SlowTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.kv_transfer.storage_queue.CLOSE_TIMEOUT_S", 0.0)
    queue, keys = queue_of(tier)
    close_concurrently(queue, tier)
    assert tier.written == keys[:1]
    assert not any(key in queue for key in keys[1:])


def test_only_the_first_of_a_prefill_replicas_outputs_waits_for_a_storage_that_hangs(
    tier: SlowTier,
) -> None:
    queue, keys = queue_of(tier)
    with pytest.raises(TimeoutError):
        queue.flush(0.01)
    with pytest.raises(TimeoutError, match="hangs"):
        queue.flush()  # without a limit it would never return
    tier.proceed.set()
    late = queue._late_flush
    assert late is not None
    late.result(60)
    queue.flush(60)
    assert tier.written == keys
    queue.close()


def test_a_prompt_that_is_aborted_is_followed_no_longer(tier: SlowTier) -> None:
    host = HostTier(1 << 20)
    queue = StorageQueue(tier, host)
    for number in range(2 * NUM_READERS):
        queue.follow(str(number), [b"%032d" % number], "t", "n", "tcp://peer:1")
    for number in range(NUM_READERS):
        queue.stop_following(str(number))
    while len(tier.followed) < 2 * NUM_READERS:  # which need the threads of the first
        pass
    tier.proceed.set()
    while len(host) < NUM_READERS:
        pass
    assert all(b"%032d" % number in host for number in range(NUM_READERS, 2 * NUM_READERS))
    queue.close()


def test_what_was_read_while_a_follower_waited_is_not_read_again(tier: SlowTier) -> None:
    host = HostTier(1 << 20)
    queue = StorageQueue(tier, host)
    late = [bytes([number]) * 32 for number in range(10)]
    for number in range(NUM_READERS):
        queue.follow(str(number), [b"%032d" % number], "t", "n", "tcp://peer:1")
    queue.follow("late", late, "t", "n", "tcp://peer:1")
    host.put([(key, np.zeros(10, np.uint8)) for key in late[:8]], "t")  # by its request
    tier.proceed.set()
    while not all(key in host for key in late):
        pass
    assert tier.followed[NUM_READERS:] == [late[8:]]
    queue.close()
