"""Access to replicas' KV blocks, and one-time snapshots of them."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from django.conf import settings

from catalog.access import access_served_models
from catalog.live_status import live_replicas, state_of
from common.errors import NotFound
from engine.contract.errors import EngineUnavailable
from engine.contract.messages import Heartbeat
from engine.contract.replica_state import WATCH_TTL_S, decode_frame, frames_key, watch_key
from engine.system.redis_client import sync_client
from kv_map.state import BlockView, Mirror, OperatorBlockView, TenantBlockView
from tenants.access import access_tenant, access_tenants
from tenants.actors import Actor, to_actor
from tenants.models import User

WAIT_S = 3.0


def snapshot(replica_id: str, sight: BlockView) -> dict[str, Any]:
    """A full frame of the replica's blocks. Blocks until the replica publishes one.

    Raises: `EngineUnavailable` after `WAIT_S`; redis.RedisError.
    """
    prefix, mirror = settings.QUIRE.key_prefix, Mirror()
    with sync_client(settings.REDIS_URL, timeout_s=WAIT_S) as client:
        channel = client.pubsub(ignore_subscribe_messages=True)
        channel.subscribe(frames_key(replica_id, prefix))
        key = watch_key(replica_id, prefix)
        with client.pipeline(transaction=True) as pipe:
            pipe.incr(key)
            pipe.expire(key, WATCH_TTL_S)
            pipe.execute()
        deadline = time.monotonic() + WAIT_S
        while (remaining_s := deadline - time.monotonic()) > 0:
            message = channel.get_message(timeout=remaining_s)
            if message is None:
                continue
            try:
                frame = decode_frame(message["data"])
            except (msgspec.DecodeError, msgspec.ValidationError):
                continue
            if frame.whole:
                mirror.apply_frame(frame)
                return sight.full_frame(mirror)
    raise EngineUnavailable("The replica did not tell of its blocks in time. Try again.")


Reader = Actor | User


def access_watchable_replicas(user: Reader) -> list[Heartbeat]:
    """Live replicas with a KV cache whose models the user may use. Raises redis.RedisError."""
    beats = [beat for beat in live_replicas() if state_of(beat) in ("ready", "draining")]
    beats = [beat for beat in beats if beat.stats.num_blocks]
    if to_actor(user).is_operator:
        return beats
    names = {
        model.name
        for tenant in access_tenants(user).filter(active=True)
        for model in access_served_models(tenant)
    }
    return [beat for beat in beats if beat.model.name in names]


def access_block_view(user: Reader, replica_id: str, tenant: str) -> BlockView:
    """The user's view of a replica as a member of `tenant`, or as an operator if "".

    Raises: `NotFound` if the user may not access the replica or the tenant.
    """
    if not any(beat.replica_id == replica_id for beat in access_watchable_replicas(user)):
        raise NotFound("Replica not found.", param="replica")
    if tenant:
        return TenantBlockView(access_tenant(user, tenant).slug)
    if not to_actor(user).is_operator:
        raise NotFound("Name one of your tenants.", param="tenant")
    return OperatorBlockView()
