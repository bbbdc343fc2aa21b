"""Telling gateways at once that a replica's process is dead: its heartbeat takes seconds to expire.

A stream's pause is what finding the death takes, and a prompt's computation. Told with it is which
requests the process was at, so that nobody else is taken for what killed it.
"""

from __future__ import annotations

import logging
import threading

import redis

from catalog.heartbeats import read_heartbeat
from catalog.processes import ManagedProcess
from engine.contract import protocol
from engine.contract.protocol import ReplicaNews
from engine.contract.step_record import LastStep, StepRecord

logger = logging.getLogger(__name__)

#: Removes a heartbeat unless another process wrote one since. KEYS: it. ARGV: what it was.
_FORGET = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"


def watch(
    process: ManagedProcess,
    replica_id: str,
    client: redis.Redis,
    prefix: str,
    record: StepRecord | None = None,
) -> None:
    """Have a thread tell of the process's death the moment it happens, and close its record."""

    def wait() -> None:
        process.await_death()
        last = None
        if record is not None:
            last = record.read()
            record.close()
        try:
            announce(client, prefix, replica_id, process.pid, last)
        except redis.RedisError as error:
            logger.warning("exit of replica %s not published: %s", replica_id, error)

    threading.Thread(target=wait, name=f"watch-{process.pid}", daemon=True).start()


def announce(
    client: redis.Redis, prefix: str, replica_id: str, pid: int, last: LastStep | None = None
) -> bool:
    """Say that a replica's process is gone, and what it was at; whether there was anything to say.

    A heartbeat that says why the replica failed stays. Raises redis.RedisError.
    """
    key = protocol.replica_key(replica_id, prefix)
    data: bytes | None = client.get(key)
    beat = None if data is None else read_heartbeat(replica_id, data)
    own = beat if beat is not None and beat.pid == pid else None
    if own is not None and own.state != "failed":
        client.eval(_FORGET, 1, key, data)
    if own is not None:
        incarnation = own.incarnation
    elif last is not None:  # its heartbeat ran out, and streams have left it for that
        incarnation = last.incarnation
    else:
        return False
    held = last.held if last is not None and last.incarnation == incarnation else None
    news = ReplicaNews(replica_id=replica_id, incarnation=incarnation, held=held)
    client.publish(protocol.news_key(prefix), protocol.encode(news))
    return True
