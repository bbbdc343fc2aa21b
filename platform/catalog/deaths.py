"""Telling gateways at once that a replica's process is dead: its heartbeat takes seconds to expire.

A stream's pause is what finding the death takes, and a prompt's computation.
"""

from __future__ import annotations

import logging
import threading

import redis

from catalog.heartbeats import read_heartbeat
from catalog.processes import ManagedProcess
from engine.contract import protocol
from engine.contract.protocol import ReplicaNews

logger = logging.getLogger(__name__)

#: Removes a heartbeat unless another process wrote one since. KEYS: it. ARGV: what it was.
_FORGET = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"


def watch(process: ManagedProcess, replica_id: str, client: redis.Redis, prefix: str) -> None:
    """Have a thread tell of the process's death the moment it happens."""

    def wait() -> None:
        process.await_death()
        try:
            announce(client, prefix, replica_id, process.pid)
        except redis.RedisError as error:
            logger.warning("the death of %s can't be told: %s", replica_id, error)

    threading.Thread(target=wait, name=f"watch-{process.pid}", daemon=True).start()


def announce(client: redis.Redis, prefix: str, replica_id: str, pid: int) -> bool:
    """Say that a replica's process is gone; whether there was anything to say.

    A heartbeat that says why the replica failed stays. Raises redis.RedisError.
    """
    key = protocol.replica_key(replica_id, prefix)
    data: bytes | None = client.get(key)
    beat = None if data is None else read_heartbeat(replica_id, data)
    if beat is None or beat.pid != pid:
        return False
    news = ReplicaNews(replica_id=replica_id, incarnation=beat.incarnation)
    if beat.state != "failed":
        client.eval(_FORGET, 1, key, data)
    client.publish(protocol.news_key(prefix), protocol.encode(news))
    return True
