"""Forgetting the answers that are kept for a tenant's idempotency keys."""

from __future__ import annotations

import logging
from typing import Protocol

import redis

from metering.redis_scripts import redis_key, sync_client


class TenantRef(Protocol):
    """The tenant's row."""

    pk: int


logger = logging.getLogger(__name__)


def delete_idempotent_responses(tenant: TenantRef) -> int:
    """Remove them all; how many. Without Redis none: they end by themselves within a day."""
    client = sync_client()
    try:
        names = list(client.scan_iter(match=redis_key(f"idempotency:{tenant.pk}:*"), count=1000))
        return sum(int(client.unlink(name)) for name in names)
    except (redis.RedisError, OSError) as error:
        logger.warning("answers of %s stay in Redis for a day: %s", tenant, error)
        return 0
    finally:
        client.close()
