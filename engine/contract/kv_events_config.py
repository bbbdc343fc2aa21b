"""`KVEventsConfig`: where changes of the prefix cache are published; vLLM's names. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from engine.contract.errors import ConfigError

_PARAM = "kv_events_config"
#: By publisher what its endpoint begins with.
_TRANSPORTS = {
    "zmq": ("tcp://", "ipc://"),
    "redis": ("redis://", "rediss://", "unix://"),
}
#: ZeroMQ counts messages in 31 bits, and the end of a replay is one more than its batches.
_MAX_BATCHES = 2**31 - 2


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Settings of the events' publisher. Raises `ConfigError` for a value out of its range.

    Attributes:
        enable_kv_cache_events: whether there are events.
        publisher: zmq, redis, or null for none; default: zmq where there are events.
        endpoint: where batches are published; see `ZmqEventPublisher`, `RedisEventPublisher`.
        replay_endpoint: of zmq: where past batches can be asked for; None: nowhere.
        buffer_steps: number of past batches that can be asked for, or that a stream keeps.
        hwm: of zmq: batches that wait for a subscriber; those after them are lost to it.
        max_queue_size: batches that wait for the publisher's thread; those after them are lost.
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


def check_kv_events(values: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a `kv_events_config` that can't be used."""
    KVEventsConfig.from_mapping(values)
