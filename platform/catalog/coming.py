"""Saying that a replica is on its way, while its process can't speak yet.

A process that was just started has to import its engine before its first heartbeat: seconds, and
half a minute on a machine that is busy. Until then its supervisor says "loading" in its place, so
that gateways keep the streams that wait for it.
"""

from __future__ import annotations

import socket
import time

import redis

from catalog.slot import Slot
from engine.contract import protocol
from engine.contract.protocol import Heartbeat, ModelInfo

#: Writes a heartbeat unless one that isn't a supervisor's for this very process is there.
#: KEYS: it, the replica ids. ARGV: the incarnation, the heartbeat, its TTL, the replica id.
_SAY = """
local known = redis.call('GET', KEYS[1])
if known and not string.find(known, ARGV[1], 1, true) then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
redis.call('SADD', KEYS[2], ARGV[4])
return 1
"""


def is_silent(slot: Slot, beat: Heartbeat | None) -> bool:
    """Whether a slot's process runs and hasn't spoken itself."""
    if slot.process is None or slot.stopping:
        return False
    return beat is None or beat.incarnation == slot.mark


def say_coming(client: redis.Redis, prefix: str, slot: Slot) -> None:
    """Say so for the time of a heartbeat. Raises redis.RedisError."""
    now = time.time()
    beat = Heartbeat(
        replica_id=slot.replica_id,
        incarnation=slot.mark,
        state="loading",
        model=ModelInfo(name=slot.model_name, path="", max_model_len=0, vocab_size=0, dtype=""),
        at=now,
        progress_at=now,
        pid=slot.last_pid,
        host=socket.gethostname(),
    )
    client.eval(
        _SAY,
        2,
        protocol.replica_key(slot.replica_id, prefix),
        protocol.replicas_key(prefix),
        slot.mark,
        protocol.encode(beat),
        int(protocol.HEARTBEAT_TTL_S * 1000),
        slot.replica_id,
    )
