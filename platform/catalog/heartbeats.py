"""Reading replicas' heartbeats from Redis."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Any, cast

import msgspec
import redis
from django.conf import settings

from catalog.processes import ManagedProcess
from common.errors import ServiceUnavailable
from engine.contract import messages, redis_keys
from engine.contract.messages import ControlRequest, Heartbeat, ReplicaEvent
from engine.system.redis_client import sync_client
from engine.system.step_record import LastStep, SharedStepRecord


def send_control(replica_id: str, command: str, **details: Any) -> None:
    """Put a `ControlRequest` into the replica's inbox. Raises `ServiceUnavailable` without
    Redis."""
    prefix = settings.QUIRE.key_prefix
    client = sync_client(settings.REDIS_URL)
    try:
        client.xadd(
            redis_keys.inbox_key(replica_id, prefix),
            {messages.STREAM_FIELD: messages.encode(ControlRequest(command=command, **details))},
        )
    except (redis.RedisError, OSError) as error:
        raise ServiceUnavailable(
            f"Replica {replica_id} is unreachable: no connection to Redis."
        ) from error
    finally:
        client.close()


logger = logging.getLogger(__name__)


def read_heartbeats(
    client: redis.Redis, prefix: str, replica_ids: Iterable[str]
) -> dict[str, Heartbeat]:
    """Existing heartbeats by replica id. Raises redis.RedisError."""
    ids = list(replica_ids)
    if not ids:
        return {}
    values = client.mget([redis_keys.replica_key(replica_id, prefix) for replica_id in ids])
    beats = {}
    for replica_id, data in zip(ids, cast("list[bytes | None]", values), strict=True):
        if data is not None and (beat := read_heartbeat(replica_id, data)) is not None:
            beats[replica_id] = beat
    return beats


def read_heartbeat(replica_id: str, data: bytes) -> Heartbeat | None:
    """Decode a heartbeat; log invalid data and return None."""
    try:
        return messages.decode_heartbeat(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        logger.warning("heartbeat of %s can't be read: %s", replica_id, error)
        return None


def registered_replicas(client: redis.Redis, prefix: str) -> set[str]:
    """Ids of all replicas that were ever registered. Raises redis.RedisError."""
    return {
        member.decode("utf-8", "replace") if isinstance(member, bytes) else str(member)
        for member in client.smembers(redis_keys.replicas_key(prefix))
    }


# A dead replica's heartbeat takes seconds to expire. Gateways are notified at once, since streams
# pause until the death is detected. The notice lists the requests that were running, so that no
# other request is blamed for the crash.

#: Removes a heartbeat unless another process has written one since. KEYS: it. ARGV: its old value.
DELETE_HEARTBEAT_SCRIPT = (
    "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"
)


def watch_process_exit(
    process: ManagedProcess,
    replica_id: str,
    client: redis.Redis,
    prefix: str,
    record: SharedStepRecord | None = None,
) -> None:
    """Start a thread that reports the process's death the moment it happens."""

    def wait() -> None:
        process.await_death()
        last = record.read() if record is not None else None
        try:
            publish_replica_exit(client, prefix, replica_id, process.pid, last)
        except redis.RedisError as error:
            logger.warning("exit of replica %s not published: %s", replica_id, error)

    threading.Thread(target=wait, name=f"watch-{process.pid}", daemon=True).start()


def publish_replica_exit(
    client: redis.Redis, prefix: str, replica_id: str, pid: int, last: LastStep | None = None
) -> bool:
    """Report that a replica's process died, with its running requests; returns whether it was news.

    A heartbeat that states why the replica failed stays. Raises redis.RedisError.
    """
    key = redis_keys.replica_key(replica_id, prefix)
    data = cast("bytes | None", client.get(key))
    beat = None if data is None else read_heartbeat(replica_id, data)
    if data is not None and beat is not None and beat.pid == pid:
        incarnation = beat.incarnation
        if beat.state != "failed":
            client.eval(DELETE_HEARTBEAT_SCRIPT, 1, key, data)
    elif last is not None:  # its heartbeat has expired, and streams have moved on already
        incarnation = last.incarnation
    else:
        return False
    in_flight = last.request_ids if last is not None and last.incarnation == incarnation else None
    news = ReplicaEvent(replica_id=replica_id, incarnation=incarnation, held=in_flight)
    client.publish(redis_keys.replica_events_channel(prefix), messages.encode(news))
    return True
