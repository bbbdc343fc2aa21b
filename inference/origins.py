"""In which trace work was asked for that runs later: a batch, a background response.

Kept in Redis while the work may run: where it's lost, the work's spans have no link.
"""

from __future__ import annotations

import logging

from redis.exceptions import RedisError

from inference.tracing import current_parent, tracing
from metering.redis_clients import key, redis_link

logger = logging.getLogger(__name__)

#: The longest completion window, and time for what waits beyond it.
KEEP_S = 3 * 24 * 3600


def _name(public_id: str) -> str:
    return key(f"origin:{public_id}")


async def keep_origin(public_id: str) -> None:
    """Remember the running request's span, unless the work's first one is known already."""
    parent = current_parent()
    if not parent:
        return
    try:
        await redis_link().execute("SET", _name(public_id), parent, "NX", "EX", str(KEEP_S))
    except RedisError as error:
        logger.warning("The spans of %s will have no link: %s", public_id, error)


async def origin_of(public_id: str) -> str:
    """A `traceparent`; "" where none is known or no spans are wanted."""
    if tracing() is None:
        return ""
    try:
        found = await redis_link().execute("GET", _name(public_id))
    except RedisError as error:
        logger.warning("The spans of %s have no link: %s", public_id, error)
        return ""
    return found.decode() if found else ""
