"""An operator's word to a replica, through its inbox."""

from typing import Any

import redis
from django.conf import settings

from engine.contract import protocol
from engine.contract.protocol import Control
from engine.contract.redis_clients import sync_client
from tenants.errors import ServiceUnavailable


def send_control(replica_id: str, command: str, **details: Any) -> None:
    """Put a `Control` into the replica's inbox. Raises `ServiceUnavailable` without Redis."""
    prefix = settings.QUIRE["KEY_PREFIX"]
    client = sync_client(settings.REDIS_URL)
    try:
        client.xadd(
            protocol.inbox_key(replica_id, prefix),
            {protocol.FIELD: protocol.encode(Control(command=command, **details))},
        )
    except (redis.RedisError, OSError) as error:
        raise ServiceUnavailable(
            f"Replica {replica_id} is unreachable: no connection to Redis."
        ) from error
    finally:
        client.close()
