"""Reading replicas' heartbeats from Redis."""

import logging
from collections.abc import Iterable

import msgspec
import redis

from engine.contract import protocol
from engine.contract.protocol import Heartbeat

logger = logging.getLogger(__name__)


def read_heartbeats(
    client: redis.Redis, prefix: str, replica_ids: Iterable[str]
) -> dict[str, Heartbeat]:
    """The heartbeats that are there, by replica id. Raises redis.RedisError."""
    ids = list(replica_ids)
    if not ids:
        return {}
    found = client.mget([protocol.replica_key(replica_id, prefix) for replica_id in ids])
    beats = {}
    for replica_id, data in zip(ids, found, strict=True):
        if data is not None and (beat := read_heartbeat(replica_id, data)) is not None:
            beats[replica_id] = beat
    return beats


def read_heartbeat(replica_id: str, data: bytes) -> Heartbeat | None:
    """One heartbeat; None, and a line in the log, for what is none."""
    try:
        return protocol.decode_heartbeat(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        logger.warning("heartbeat of %s can't be read: %s", replica_id, error)
        return None


def known_replicas(client: redis.Redis, prefix: str) -> set[str]:
    """Every replica id that was ever announced. Raises redis.RedisError."""
    return {
        member.decode("utf-8", "replace") if isinstance(member, bytes) else str(member)
        for member in client.smembers(protocol.replicas_key(prefix))
    }
