"""Telling pages that are open, from any process: over Channels' layer to every gateway.

`console.live` says which topics there are and who may have them. What is told is for looking at:
nobody keeps it for a page that isn't there.
"""

from __future__ import annotations

import logging
from typing import Any

import redis
from asgiref.sync import async_to_sync
from channels.layers import get_channel_layer

logger = logging.getLogger(__name__)
#: The tenant of what is told to whoever may have the topic at all.
ALL_TENANTS = 0


def group_name(topic: str, tenant_id: int = ALL_TENANTS) -> str:
    """The layer's group of a topic, for one tenant or all."""
    return f"live.{topic}.{tenant_id}"


async def send_to_group(topic: str, tenant_id: int, data: dict[str, Any]) -> None:
    """Send a topic's news to its group. Raises redis.RedisError, OSError."""
    layer: Any = get_channel_layer()
    message = {"type": "live", "topic": topic, "tenant_id": tenant_id, "data": data}
    await layer.group_send(group_name(topic, tenant_id), message)


async def broadcast(topic: str, data: dict[str, Any], *, tenant_id: int = ALL_TENANTS) -> None:
    """Tell all who have the topic open; of a tenant's, its members and operators who see all.

    `data` is small and plain. A layer that is away costs the news, nothing else.
    """
    try:
        for group in {tenant_id, ALL_TENANTS}:
            await send_to_group(topic, group, data)
    except (redis.RedisError, OSError) as error:
        logger.debug("live update %s not sent: %s", topic, error)


broadcast_sync = async_to_sync(broadcast)
