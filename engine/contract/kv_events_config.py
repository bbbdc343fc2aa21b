"""`KVEventsConfig`: where changes of the prefix cache are published; vLLM's names. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from engine.contract.errors import ConfigError

_PARAM = "kv_events_config"
#: Prefix of the endpoint, by publisher.
_TRANSPORTS = {
    "zmq": ("tcp://", "ipc://"),
    "redis": ("redis://", "rediss://", "unix://"),
}
#: ZeroMQ counts messages in 31 bits, and a replay ends with an additional message.
_MAX_BATCHES = 2**31 - 2


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Settings of the events' publisher. Raises `ConfigError` for a value out of range.

    Attributes:
        enable_kv_cache_events: whether events are published.
        publisher: zmq, redis, or null for none; default: zmq if events are enabled.
        endpoint: where batches are published; see `ZmqEventPublisher`, `RedisEventPublisher`.
        replay_endpoint: for zmq: where past batches can be requested; None: nowhere.
        buffer_steps: number of past batches that can be requested, or that a stream retains.
        hwm: for zmq: maximum number of batches queued per subscriber; it misses further ones.
        max_queue_size: maximum number of batches queued for the publisher's thread; further ones
        are
            lost.
        topic: first frame of each message, or the stream.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @property
    def publishes(self) -> bool:
        """Whether events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build from JSON. Raises `ConfigError`."""
        fields = {spec.name: spec for spec in dataclasses.fields(cls)}
        for name, value in values.items():
            if name not in fields:
                raise ConfigError(f"{_PARAM} has no {name!r}: {sorted(fields)}.", param=_PARAM)
            default = fields[name].default
            if isinstance(default, bool):
                valid, kind = isinstance(value, bool), "true or false"
            elif isinstance(default, int):
                valid = type(value) is int and 1 <= value <= _MAX_BATCHES
                kind = f"a number from 1 to {_MAX_BATCHES}"
            else:
                valid, kind = isinstance(value, str) or value is default, "a string"
            if not valid:
                raise ConfigError(f"{_PARAM}: {name} must be {kind}; got {value!r}.", param=_PARAM)
        config = cls(**values)
        if config.publisher not in (*_TRANSPORTS, "null", None):
            raise ConfigError(
                f"{_PARAM}: publisher must be zmq, redis or null; got {config.publisher!r}.",
                param=_PARAM,
            )
        if config.publisher == "redis" and (config.replay_endpoint or not config.topic):
            raise ConfigError(
                f"{_PARAM}: publisher redis needs a topic, the stream, and has no "
                "replay_endpoint: a stream is read from any entry on.",
                param=_PARAM,
            )
        transports = _TRANSPORTS["redis" if config.publisher == "redis" else "zmq"]
        for name in ("endpoint", "replay_endpoint"):
            endpoint = getattr(config, name)
            if endpoint is not None and not endpoint.startswith(transports):
                raise ConfigError(
                    f"{_PARAM}: {name} must begin with {' or '.join(transports)}; "
                    f"got {endpoint!r}.",
                    param=_PARAM,
                )
        return config
