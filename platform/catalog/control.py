"""An operator's word to a replica, through its inbox."""

from typing import Any

import redis
from django.conf import settings

from engine.contract import protocol
from engine.contract.protocol import Control
from tenants.errors import ServiceUnavailable


def send_control(replica_id: str, command: str, **details: Any) -> None:
    """Put a `Control` into the replica's inbox. Raises `ServiceUnavailable` without Redis."""
    prefix = settings.QUIRE["KEY_PREFIX"]
    client = redis.Redis.from_url(settings.REDIS_URL, socket_timeout=5, socket_connect_timeout=5)
    try:
        client.xadd(
            protocol.inbox_key(replica_id, prefix),
            {protocol.FIELD: protocol.encode(Control(command=command, **details))},
        )
    except (redis.RedisError, OSError) as error:
        raise ServiceUnavailable(f"{replica_id} can't be reached: Redis is away.") from error
    finally:
        client.close()
