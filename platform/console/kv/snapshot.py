"""One look at a replica's blocks, for those who don't stay."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from django.conf import settings

from console.kv.mirror import Mirror
from console.kv.sight import Sight
from engine.contract.block_map import WATCH_TTL_S, decode_frame, frames_key, watch_key
from engine.contract.errors import EngineUnavailable
from engine.contract.redis_clients import sync_client

WAIT_S = 3.0


def snapshot(replica_id: str, sight: Sight) -> dict[str, Any]:
    """What the viewer sees of it now. Blocks until the replica has told, 3 s at most.

    Raises: `EngineUnavailable` when it doesn't; redis.RedisError.
    """
    prefix, mirror = settings.QUIRE["KEY_PREFIX"], Mirror()
    with sync_client(settings.REDIS_URL, timeout_s=WAIT_S) as client:
        channel = client.pubsub(ignore_subscribe_messages=True)
        channel.subscribe(frames_key(replica_id, prefix))
        key = watch_key(replica_id, prefix)
        with client.pipeline(transaction=True) as pipe:
            pipe.incr(key)
            pipe.expire(key, WATCH_TTL_S)
            pipe.execute()
        until = time.monotonic() + WAIT_S
        while (left := until - time.monotonic()) > 0:
            message = channel.get_message(timeout=left)
            if message is None:
                continue
            try:
                frame = decode_frame(message["data"])
            except (msgspec.DecodeError, msgspec.ValidationError):
                continue
            if frame.whole:
                mirror.take(frame)
                return sight.whole(mirror)
    raise EngineUnavailable("The replica did not tell of its blocks in time. Try again.")
