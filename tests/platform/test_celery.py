"""Celery reaches its broker, also over a Unix socket."""

import uuid

from config.celery import app
from config.redis_urls import celery_url


def test_a_message_goes_through_the_broker(live_redis: str) -> None:
    with app.connection_for_write(celery_url(live_redis)) as connection:
        queue = connection.SimpleQueue(f"q{uuid.uuid4().hex}")
        queue.put({"hello": 1}, serializer="json")
        message = queue.get(timeout=10)
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
