"""Publishers of the prefix cache's changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.contract.kv_events_config import KVEventsConfig

if TYPE_CHECKING:
    from engine.kv_transfer.redis_event_publisher import RedisEventPublisher
    from engine.kv_transfer.zmq_event_publisher import ZmqEventPublisher


def make_event_publisher(
    config: EngineConfig,
) -> ZmqEventPublisher | RedisEventPublisher | None:
    """The publisher of KV events; None: the settings ask for none. Raises `ConfigError`."""
    events = KVEventsConfig.from_mapping(config.kv_events_config or {})
    if not events.publishes:
        return None
    if events.publisher == "redis":
        from engine.kv_transfer.redis_event_publisher import RedisEventPublisher

        return RedisEventPublisher(events)
    try:
        from engine.kv_transfer.zmq_event_publisher import ZmqEventPublisher
    except ImportError as error:
        raise ConfigError(
            "kv_events_config needs pyzmq: pip install 'quire[kv-events]'.",
            param="kv_events_config",
        ) from error
    return ZmqEventPublisher(events)
