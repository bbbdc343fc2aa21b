"""What a replica tells of its KV blocks while somebody watches them.

Who watches counts `watch_key` up and renews its expiry; the replica sees that with its heartbeat
and publishes `BlockFrame`s on `frames_key` until the key is gone. A number that it hasn't seen
makes it begin with a whole frame. Frames name tenants and requests: whoever passes them on to a
tenant leaves all of others' out.
"""

from __future__ import annotations

import msgspec

from engine.contract.protocol import KEY_PREFIX

#: A replica goes on for so long after the last word of those who watch.
WATCH_TTL_S = 5
#: Requests that are named for one block.
MOST_USERS = 4


def watch_key(replica_id: str, prefix: str = KEY_PREFIX) -> str:
    """Key of the number of those who began to watch a replica's blocks."""
    return f"{prefix}:watch:{replica_id}"


def frames_key(replica_id: str, prefix: str = KEY_PREFIX) -> str:
    """Channel of a replica's `BlockFrame`s."""
    return f"{prefix}:blocks:{replica_id}"


class TenantBlocks(msgspec.Struct, array_like=True):
    """One tenant's blocks and sequences; `maximum` and `reserved` in blocks."""

    name: str
    used: int
    free: int
    reserved: int
    maximum: int
    running: int
    waiting: int


class BlockState(msgspec.Struct, array_like=True, gc=False):
    """A block that changed.

    Attributes:
        refs: sequences that use it. cached: whether a prefix could hit it.
        owner: in `BlockFrame.words`, the tenant that it's charged to or that used it last.
        users: the same, ids of requests that use it, at most `MOST_USERS`.
        adapter: the same, the name of the adapter that it was computed with; "" for none.
    """

    block_id: int
    refs: int
    cached: bool
    owner: int
    users: list[int]
    adapter: int


class BlockFrame(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What changed since the frame before.

    Attributes:
        number: from 1, without gaps within a `run`: what begins with each whole frame.
        whole: `blocks` has all that were ever used; the others are free and empty.
        evicted: cached blocks that were taken for something else since the frame before.
        words: what the numbers in `blocks` mean, in this frame alone.
    """

    replica_id: str
    incarnation: str
    number: int
    run: int
    at: float
    num_blocks: int
    block_size: int
    num_free: int
    num_cached: int
    whole: bool = False
    evicted: int = 0
    tenants: list[TenantBlocks] = msgspec.field(default_factory=list)
    words: list[str] = msgspec.field(default_factory=list)
    blocks: list[BlockState] = msgspec.field(default_factory=list)


_decoder = msgspec.msgpack.Decoder(BlockFrame)


def decode_frame(data: bytes) -> BlockFrame:
    """Raises msgspec.DecodeError or ValidationError for bytes that are no frame."""
    return _decoder.decode(data)
