"""Notifying open pages from any process: through Channels' layer to every gateway.

`console.live` defines the topics and access to them. Messages are for display only: they aren't
stored for pages that aren't open.
"""

from __future__ import annotations

import logging
from typing import Any

import redis
from asgiref.sync import async_to_sync
from channels.layers import get_channel_layer

logger = logging.getLogger(__name__)
#: Stands for all tenants in messages to everyone with access to the topic.
ALL_TENANTS = 0


def group_name(topic: str, tenant_id: int = ALL_TENANTS) -> str:
    """The channel layer's group of a topic, for one tenant or all."""
    return f"live.{topic}.{tenant_id}"


async def send_to_group(topic: str, tenant_id: int, data: dict[str, Any]) -> None:
    """Send a message to the topic's group. Raises redis.RedisError, OSError."""
    layer: Any = get_channel_layer()
    message = {"type": "live", "topic": topic, "tenant_id": tenant_id, "data": data}
    await layer.group_send(group_name(topic, tenant_id), message)


async def broadcast(topic: str, data: dict[str, Any], *, tenant_id: int = ALL_TENANTS) -> None:
    """Notify every open page of the topic; a tenant's only for its members and operators.

    `data` is small and plain. If the channel layer is down, only this message is lost.
    """
    try:
        for group in {tenant_id, ALL_TENANTS}:
            await send_to_group(topic, group, data)
    except (redis.RedisError, OSError) as error:
        logger.debug("live update %s not sent: %s", topic, error)


broadcast_sync = async_to_sync(broadcast)
