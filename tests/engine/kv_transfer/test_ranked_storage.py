"""The first rank's storage and another rank's connector agree on what is in both memories."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from engine.distributed.channel import Channel, ChannelClosed, encode_frame
from engine.kv_cache.kv_cache_config import single_group_config
from engine.kv_transfer.block_keys import BlockKeys
from engine.kv_transfer.disk_tier import DiskTier
from engine.kv_transfer.host_tier import HostTier
from engine.kv_transfer.offloading_metadata import OffloadingMetadata
from engine.kv_transfer.rank_connector import RankConnector
from engine.kv_transfer.ranked_storage import (
    FlushParts,
    PartsReply,
    RankedStorage,
    ReadParts,
    part_key,
)
from engine.kv_transfer.storage_queue import StorageQueue
from tests.waiting import wait_until

BLOCK = 256
KEYS = [bytes([number]) * 32 for number in range(4)]
BUDGET = 1 << 20


class Group:
    """Two ranks of one process.

    Attributes:
        storage, host: the first rank's.
        other: the second rank's connector, whose KV cache has blocks of their numbers.
        removed: what the first rank's memory has removed.
    """

    def __init__(self, folder: Path, host_bytes: int = BUDGET) -> None:
        self.host = HostTier(host_bytes)
        self.removed: list[bytes] = []
        self.host.on_removed = self.removed.append
        self.storage = RankedStorage(DiskTier(folder, BUDGET, BLOCK), self.host, 2)
        host = HostTier(1 << 62)
        queue = StorageQueue(DiskTier(folder, BUDGET, BLOCK), host, BUDGET)
        self.other = RankConnector(1, single_group_config(1), host, queue)
        self.cache = torch.arange(4, dtype=torch.uint8).repeat_interleave(BLOCK).view(4, BLOCK)
        self.other.register_kv_caches({"layers.0": (self.cache,)})
        ours, theirs = (Channel(end) for end in socket.socketpair())
        self._theirs = theirs
        self.storage.connect([ours])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        try:
            while True:
                if (data := self._theirs.receive(1.0)) is not None:
                    call = msgspec.msgpack.decode(data, type=ReadParts | FlushParts)
                    self.other.serve(call, self._reply)
        except ChannelClosed:
            return

    def _reply(self, reply: PartsReply) -> None:
        self._theirs.send(encode_frame(reply))

    def save(self, step: int, keys: list[bytes] = KEYS) -> None:
        """Both save blocks in a step."""
        payloads = [(key, np.full(BLOCK, 9, np.uint8)) for key in keys]
        self.host.put(payloads, "t")
        self.storage.queue_writes(payloads, "ns", "t")
        self.storage.saved_step = step
        blocks = [(0, KEYS.index(key), [key]) for key in keys]
        self.run(OffloadingMetadata(step, saves=[("t", "ns", blocks)]))

    def run(self, metadata: OffloadingMetadata) -> None:
        """A step of the other rank."""
        other, other.last_step = self.other, metadata.step
        other.bind_connector_metadata(metadata)
        other.start_load_kv()
        other.wait_for_save()
        other.clear_connector_metadata()

    def forget(self) -> None:
        """Empty both memories."""
        self.storage.flush(10.0)
        self.storage.tier.refresh()
        self.host.clear()
        self.other.reset_cache()
        self.removed.clear()

    def read(self) -> Future[None]:
        return self.storage.read_ahead(KEYS, "t", "ns", 10.0)

    @property
    def parts(self) -> list[bool]:
        """Whether the other rank's memory has its parts."""
        return [part_key(key, 1) in self.other.host for key in KEYS]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    group = Group(tmp_path)
    yield group
    group.storage.close()
    group.other.shutdown()


def test_blocks_are_there_once_both_parts_are_written(group: Group) -> None:
    payloads = [(key, np.zeros(BLOCK, np.uint8)) for key in KEYS]
    group.storage.queue_writes(payloads, "ns", "t")
    group.forget()
    assert KEYS[0] in group.storage.tier
    assert KEYS[0] not in group.storage
    assert not group.storage.may_contain(KEYS[0])
    group.save(1)
    group.forget()
    assert all(key in group.storage and group.storage.may_contain(key) for key in KEYS)


def test_no_part_has_the_key_of_another_payload_of_its_block() -> None:
    keys = BlockKeys(b"", single_group_config(1), 16, [9]).of_block(0, bytes(32))
    parts = [part_key(key, rank) for key in keys for rank in range(1, 9)]
    assert len({*keys, *parts}) == 9 * 9


def test_both_read_their_parts(group: Group) -> None:
    group.save(1)
    group.forget()
    group.cache[:] = 0
    group.read().result(10.0)
    assert all(key in group.host for key in KEYS)
    loads = [(0, number, [key]) for number, key in enumerate(KEYS)]
    group.run(OffloadingMetadata(2, loads=loads))
    assert [row.unique().tolist() for row in group.cache] == [[0], [1], [2], [3]]


def test_what_one_rank_cannot_read_the_others_remove_and_all_write_again(group: Group) -> None:
    group.save(1)
    group.forget()
    assert group.other.storage is not None
    tier = group.other.storage.tier
    assert isinstance(tier, DiskTier)
    location = tier._index[part_key(KEYS[2], 1)]
    with (tier.folder / location.segment).open("r+b") as file:
        file.seek(location.offset)
        file.write(bytes(8))
    group.read().result(10.0)
    assert [key in group.host for key in KEYS] == [True, True, False, False]
    assert group.storage.failures == {"authentication": 1}
    assert KEYS[2] not in group.storage
    wait_until(lambda: KEYS[2] in group.removed)
    group.run(OffloadingMetadata(2, removed=[(1, key) for key in group.removed], num_calls=99))
    assert group.parts == [True, True, False, False]
    group.save(3, [KEYS[2]])
    group.forget()
    group.read().result(10.0)
    assert all(key in group.host for key in KEYS)


def test_a_plan_made_before_a_read_does_not_remove_what_it_reads(group: Group) -> None:
    group.save(1)
    group.forget()
    num_calls = group.storage.num_calls
    group.read().result(10.0)
    removed = [(1, key) for key in KEYS]
    group.run(OffloadingMetadata(2, removed=removed, num_calls=num_calls))
    assert all(group.parts)
    group.run(OffloadingMetadata(3, removed=removed, num_calls=group.storage.num_calls))
    assert not any(group.parts)


def test_blocks_count_as_being_read_until_all_ranks_have_read_them(group: Group) -> None:
    group.save(1)
    group.forget()
    serve, may_reply = group.other.serve, threading.Event()

    def late(call: ReadParts | FlushParts, reply: Callable[[PartsReply], None]) -> None:
        may_reply.wait(10.0)
        serve(call, reply)

    group.other.serve = late  # type: ignore[method-assign]
    reading = group.read()
    wait_until(lambda: group.storage.is_being_read(KEYS[0]))
    time.sleep(0.05)  # for this rank's own parts
    assert KEYS[0] not in group.host
    assert group.storage.is_being_read(KEYS[0])
    may_reply.set()
    reading.result(10.0)
    assert KEYS[0] in group.host
    wait_until(lambda: not group.storage.is_being_read(KEYS[0]))


def test_a_flush_waits_for_steps_that_still_run_on_other_ranks(group: Group) -> None:
    group.storage.saved_step = 7
    with pytest.raises(TimeoutError, match="Other ranks haven't written"):
        group.storage.flush(0.05)
    call = group.storage._flush_other_ranks(0.01)
    assert call.replied.wait(10.0)
    assert not call.replies[1].is_written
    flush = threading.Thread(target=group.storage.flush, args=(10.0,))
    flush.start()
    blocks = [(0, number, [key]) for number, key in enumerate(KEYS)]
    group.run(OffloadingMetadata(7, saves=[("t", "ns", blocks)]))
    flush.join(10.0)
    group.storage.tier.refresh()
    assert all(part_key(key, 1) in group.storage.tier for key in KEYS)


def test_a_rank_that_has_ended_has_read_nothing(group: Group) -> None:
    group.save(1)
    group.forget()
    group._theirs.shutdown()
    group.read().result(10.0)
    assert not any(key in group.host for key in KEYS)
    assert not group.storage.is_being_read(KEYS[0])


def test_a_read_ends_while_the_folder_is_gone(group: Group, tmp_path: Path) -> None:
    group.save(1)
    group.forget()
    shutil.rmtree(tmp_path)
    group.read().result(5.0)
    assert not any(key in group.host for key in KEYS)
    wait_until(lambda: not group.storage.is_being_read(KEYS[0]))


def test_what_the_first_ranks_memory_has_no_space_for_is_removed_from_others(
    tmp_path: Path,
) -> None:
    group = Group(tmp_path, host_bytes=2 * BLOCK)
    group.save(1)
    assert group.parts == [True] * 4
    assert group.removed == KEYS[2:]
    group.run(OffloadingMetadata(3, removed=[(1, key) for key in group.removed]))
    assert group.parts == [True, True, False, False]
    group.storage.close()
    group.other.shutdown()
