"""Who may look at which replica's blocks, and as whom."""

from __future__ import annotations

from catalog.access import access_served_models
from console.kv.sight import OperatorSight, Sight, TenantSight
from console.replicas import live_replicas, state_of
from engine.contract.protocol import Heartbeat
from tenants.access import access_tenant, access_tenants
from tenants.actors import Actor, as_actor
from tenants.errors import NotFound
from tenants.models import User

Reader = Actor | User


def access_watched(user: Reader) -> list[Heartbeat]:
    """Live replicas with a KV cache whose models the user may use. Raises redis.RedisError."""
    beats = [beat for beat in live_replicas() if state_of(beat) in ("ready", "draining")]
    beats = [beat for beat in beats if beat.stats.num_blocks]
    if as_actor(user).is_operator:
        return beats
    names = {
        model.name
        for tenant in access_tenants(user).filter(active=True)
        for model in access_served_models(tenant)
    }
    return [beat for beat in beats if beat.model.name in names]


def access_sight(user: Reader, replica_id: str, tenant: str) -> Sight:
    """What the user sees of a replica; `tenant`: as a member of it, "" as an operator.

    Raises `NotFound` for a replica that they may not see, and for a stranger's tenant.
    """
    if not any(beat.replica_id == replica_id for beat in access_watched(user)):
        raise NotFound("Replica not found.", param="replica")
    if tenant:
        return TenantSight(access_tenant(user, tenant).slug)
    if not as_actor(user).is_operator:
        raise NotFound("Name one of your tenants.", param="tenant")
    return OperatorSight()
