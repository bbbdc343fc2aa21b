"""`KVEventsConfig`: where changes of the prefix cache are published; vLLM's names. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.command_line import JsonSettings, bounded

#: Prefix of the endpoint, by publisher.
_TRANSPORTS = {
    "zmq": ("tcp://", "ipc://"),
    "redis": ("redis://", "rediss://", "unix://"),
}
#: ZeroMQ counts messages in 31 bits, and a replay ends with an additional message.
_MAX_BATCHES = 2**31 - 2


@dataclass(frozen=True, kw_only=True)
class KVEventsConfig(JsonSettings):
    """Settings of the events' publisher.

    Attributes:
        enable_kv_cache_events: whether events are published.
        publisher: zmq, redis, or null for none; default: zmq if events are enabled.
        endpoint: where batches are published; see `ZmqEventPublisher`, `RedisEventPublisher`.
        replay_endpoint: for zmq: where past batches can be requested; None: nowhere.
        buffer_steps: number of past batches that can be requested, or that a stream retains.
        hwm: for zmq: maximum number of batches queued per subscriber; it misses further ones.
        max_queue_size: maximum number of batches queued for the publisher's thread; further ones
            are lost.
        topic: first frame of each message, or the stream.
    """

    PARAM = "kv_events_config"

    enable_kv_cache_events: bool = False
    publisher: str | None = bounded(None, choices=(*_TRANSPORTS, "null"))
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = bounded(10_000, low=1, high=_MAX_BATCHES)
    hwm: int = bounded(100_000, low=1, high=_MAX_BATCHES)
    max_queue_size: int = bounded(100_000, low=1, high=_MAX_BATCHES)
    topic: str = ""

    @property
    def publishes(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.publisher == "redis" and (self.replay_endpoint or not self.topic):
            raise self.error(
                "publisher redis needs a topic, the stream, and has no replay_endpoint: a stream "
                "is read from any entry on."
            )
        transports = _TRANSPORTS["redis" if self.publisher == "redis" else "zmq"]
        for name in ("endpoint", "replay_endpoint"):
            endpoint = getattr(self, name)
            if endpoint is not None and not endpoint.startswith(transports):
                raise self.error(
                    f"{name} must begin with {' or '.join(transports)}; got {endpoint!r}."
                )
