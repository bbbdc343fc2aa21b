"""Celery reaches its broker, also over a Unix socket."""

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery

from config.celery import ClockSafeScheduler, app
from config.connections import celery_url


def test_a_message_goes_through_the_broker(live_redis: str) -> None:
    with app.connection_for_write(celery_url(live_redis)) as connection:
        queue = connection.SimpleQueue(f"q{uuid.uuid4().hex}")
        queue.put({"hello": 1}, serializer="json")
        message = queue.get(timeout=60)
        assert message.payload == {"hello": 1}
        message.ack()
        queue.close()


async def test_channel_layers_reach_redis_over_a_socket(live_redis: str) -> None:
    from channels_redis.pubsub import RedisPubSubChannelLayer

    layer = RedisPubSubChannelLayer(hosts=[live_redis], prefix=uuid.uuid4().hex)
    await layer.group_add("g", channel := await layer.new_channel())
    await layer.group_send("g", {"type": "hello"})
    assert (await layer.receive(channel))["type"] == "hello"
    await layer.flush()


class Fired(ClockSafeScheduler):
    """Notes what it would have asked for."""

    producer = None  # no broker

    def __init__(self, app: Celery) -> None:
        self.fired: list[datetime] = []
        super().__init__(app)

    def setup_schedule(self) -> None:
        self.install_default_entries({})
        self.merge_inplace(self.app.conf.beat_schedule)

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        self.fired.append(self.app.now())


@pytest.mark.parametrize("shift", [-3600, -0.1, 3600], ids=["an-hour-back", "adjusted", "forward"])
def test_fault_35_the_workers_schedule_goes_on_whatever_the_clock_does(shift: float) -> None:
    clock = [datetime(2026, 10, 25, 2, 59, tzinfo=UTC)]
    application = Celery("clocked", set_as_current=False)
    application.now = lambda: clock[0]
    application.conf.beat_schedule = {"sweep": {"task": "sweep", "schedule": 10.0}}
    beat = Fired(application)

    def seconds(count: int) -> int:
        initial_count = len(beat.fired)
        for _ in range(count):
            clock[0] += timedelta(seconds=1)
            for _ in range(3):
                beat.tick()
        return len(beat.fired) - initial_count

    assert 5 <= seconds(60) <= 7
    clock[0] += timedelta(seconds=shift)
    assert 5 <= seconds(60) <= 7
