"""`RedisPipeline`: order, pipelining, and what a command learns when Redis goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from engine.system.redis_client import RedisPipeline
from tests.services import running_redis


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> object:
    with running_redis(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture
async def link(url: str) -> AsyncIterator[RedisPipeline]:
    redis_pipeline = RedisPipeline(url)
    yield redis_pipeline
    await redis_pipeline.close()


async def test_replies_come_in_the_order_of_the_commands(link: RedisPipeline) -> None:
    sent = [link.send("ECHO", f"{n}") for n in range(1000)]
    assert await asyncio.gather(*sent) == [b"%d" % n for n in range(1000)]


async def test_one_commands_error_is_its_own(link: RedisPipeline) -> None:
    good, bad, gone = link.send("PING"), link.send("NOSUCH"), link.send("EVALSHA", "a" * 40, 0)
    with pytest.raises(ResponseError):
        await bad
    with pytest.raises(NoScriptError):
        await gone
    assert await good == b"PONG"


async def test_a_caller_who_leaves_takes_no_ones_reply(link: RedisPipeline) -> None:
    cancelled, stays = link.send("ECHO", "left"), link.send("ECHO", "stays")
    cancelled.cancel()
    assert await stays == b"stays"


async def test_a_reply_is_heard_as_it_arrives_before_whoever_awaits_it_goes_on(
    link: RedisPipeline,
) -> None:
    heard: list[object] = []
    reply = link.send("ECHO", "news", hear=lambda reply: heard.append((reply, order.copy())))
    order: list[str] = []

    async def wait() -> None:
        await reply
        order.append("awaited")

    await wait()
    assert heard == [(b"news", [])]
    failed = link.send("NOSUCH", hear=heard.append)
    with pytest.raises(ResponseError):
        await failed
    assert len(heard) == 1


async def test_what_was_sent_is_written_with_the_turn_or_when_asked_and_once(
    link: RedisPipeline,
) -> None:
    await link.execute("PING")
    wire = link._wire
    assert wire is not None
    first = link.send("ECHO", "1")
    assert not wire.pending
    link.flush()
    assert list(wire.pending) == [first]
    second = link.send("ECHO", "2")
    assert await asyncio.gather(first, second) == [b"1", b"2"]
    assert not wire.pending


async def test_binary_words_and_numbers_arrive_as_they_are(link: RedisPipeline) -> None:
    data = bytes(range(256)) * 4096
    await link.execute("SET", "k", data)
    assert await link.execute("GET", "k") == data
    assert await link.execute("EXPIRE", "k", 10) == 1


async def test_a_broken_connection_fails_what_waits_and_the_next_command_connects_anew(
    link: RedisPipeline,
) -> None:
    number = await link.execute("CLIENT", "ID")
    waiting = link.send("BLPOP", "nothing", 0)
    other = RedisPipeline(link._url)
    await other.execute("CLIENT", "KILL", "ID", number)
    await other.close()
    with pytest.raises(RedisConnectionError):
        await waiting
    assert await link.execute("PING") == b"PONG"
    assert await link.execute("CLIENT", "ID") != number


async def test_a_redis_that_stands_still_is_given_up(url: str) -> None:
    link = RedisPipeline(url, timeout_s=0.05)
    with pytest.raises(RedisTimeoutError):
        await link.execute("BLPOP", "nothing", 0)
    assert await link.execute("PING") == b"PONG"
    await link.close()


async def test_an_idle_link_waits_for_nothing(url: str) -> None:
    link = RedisPipeline(url, timeout_s=0.5)
    await link.execute("PING")
    await asyncio.sleep(0.7)
    assert await link.execute("PING") == b"PONG"
    await link.close()


async def test_without_redis_commands_fail_at_once(tmp_path: Path) -> None:
    link = RedisPipeline(f"unix://{tmp_path}/none.sock")
    sent = [link.send("PING"), link.send("PING")]
    for future in sent:
        with pytest.raises(RedisConnectionError):
            await future
    await link.close()


async def test_closing_sends_what_was_handed_in(url: str) -> None:
    link = RedisPipeline(url)
    await link.execute("DEL", "kept")
    link.send("SET", "kept", "1")
    await link.close()
    other = RedisPipeline(url)
    assert await other.execute("GET", "kept") == b"1"
    await other.close()


async def test_more_commands_than_may_wait_are_refused(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.system.redis_client.MAX_PENDING", 2)
    link = RedisPipeline(url)
    sent = [link.send("PING") for _ in range(3)]
    assert await sent[0] == b"PONG"
    with pytest.raises(RedisConnectionError):
        await sent[2]
    await link.close()
