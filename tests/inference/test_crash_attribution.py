"""Over which request a replica died: who only ran beside it goes on, however often that happens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine.contract import messages as protocol
from engine.text.tokenizer import Tokenizer
from inference.engine_client.client import get_engine_client
from tests.fakes.fake_replica import FakeReplica
from tests.inference.conftest import Gateway, until
from tests.inference.failing_over import (
    expected_text,
    expire,
    read,
    start,
    tell_of_death,
    text_of,
    until_dead,
)


async def test_a_request_whose_replicas_all_vanish_is_given_up(
    gateway: Gateway, settings: Any
) -> None:
    """Nobody says what they were at: it may be the request."""
    settings.QUIRE = settings.QUIRE.replace(max_attempts=3)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(gateway.fake(die_after=0, replica_id="r0"))
        await gateway.refresh()
        asking = asyncio.create_task(gateway.client.chat())
        for number in range(1, 8):
            await asyncio.sleep(0.1)
            if asking.done():
                break
            await expire(gateway, FakeReplica("redis://", replica_id=f"r{number - 1}"))
            replica = gateway.fake(die_after=0, replica_id=f"r{number}")
            await stack.enter_async_context(replica)
            await gateway.refresh()
        reply = await asking
    assert (reply.status, reply.error["code"]) == (500, "engine_fault")
    assert "3 replicas" in reply.error["message"]


class Deaths:
    """Replicas that die one after the other, each before a request's next token."""

    def __init__(self, gateway: Gateway, stack: contextlib.AsyncExitStack) -> None:
        self._gateway, self._stack = gateway, stack
        self.replicas: list[FakeReplica] = []

    async def next(
        self, *in_flight: str, is_registered: bool = True, die_after: int | None = 0
    ) -> FakeReplica:
        """The one before is dead, and another replica is there.

        `in_flight`: what that was at; "it" for the request that it was given last. `is_registered`:
        whether anybody says so.
        """
        if self.replicas:
            lost = self.replicas[-1]
            await until_dead(lost)
            if is_registered:
                await self.tell(lost, *in_flight)
            await expire(self._gateway, lost)
        replica = self._gateway.fake(die_after=die_after)
        self.replicas.append(await self._stack.enter_async_context(replica))
        await self._gateway.refresh()
        return replica

    async def tell(self, lost: FakeReplica, *in_flight: str) -> None:
        """Say what a dead one was at."""
        local_request_id = lost.received[-1].request_id
        ids = [local_request_id if word == "it" else word for word in in_flight]
        await tell_of_death(self._gateway, lost, ids)


@pytest.fixture
async def deaths(gateway: Gateway) -> AsyncIterator[Deaths]:
    async with contextlib.AsyncExitStack() as stack:
        yield Deaths(gateway, stack)


async def test_replicas_that_die_over_other_requests_are_no_fault_of_one_that_waits(
    gateway: Gateway, deaths: Deaths, tokenizer: Tokenizer, settings: Any
) -> None:
    settings.QUIRE = settings.QUIRE.replace(max_attempts=2)
    await deaths.next()
    exchange = start(gateway)
    for _ in range(5):
        await deaths.next("another")
    last = await deaths.next("another", die_after=None)
    assert text_of(await read(exchange)) == expected_text(tokenizer)
    assert not last.received[-1].isolated


async def test_after_two_deaths_in_company_a_request_runs_alone_and_a_token_clears_it(
    gateway: Gateway, deaths: Deaths, tokenizer: Tokenizer, settings: Any
) -> None:
    settings.QUIRE = settings.QUIRE.replace(max_attempts=2)
    await deaths.next()
    exchange = start(gateway)
    await deaths.next("it", "another")
    await deaths.next("another", "it", die_after=10)
    await deaths.next("it")
    await deaths.next("it", "another", die_after=None)
    assert text_of(await read(exchange)) == expected_text(tokenizer)
    isolated = [replica.received[-1].isolated for replica in deaths.replicas]
    assert isolated == [False, False, True, False, False]


async def test_a_request_over_which_replicas_die_alone_is_given_up(
    gateway: Gateway, deaths: Deaths, settings: Any
) -> None:
    """Two die in company, which may be anybody's fault, and then `MAX_ATTEMPTS` of it alone."""
    settings.QUIRE = settings.QUIRE.replace(max_attempts=3)
    await deaths.next()
    asking = asyncio.create_task(gateway.client.chat())
    await deaths.next("it", "another")
    await deaths.next("it", "another")
    for _ in range(3):
        assert not asking.done()
        await deaths.next("it")
    reply = await asyncio.wait_for(asking, 60)
    assert (reply.status, reply.error["code"]) == (500, "engine_fault")
    assert "5 replicas" in reply.error["message"]


async def test_what_is_told_late_of_a_death_still_clears_who_only_waited(
    gateway: Gateway, deaths: Deaths, tokenizer: Tokenizer, settings: Any
) -> None:
    """A replica that is cut off from Redis is left for that, and its supervisor ends it later."""
    settings.QUIRE = settings.QUIRE.replace(max_attempts=2)
    await deaths.next()
    exchange = start(gateway)
    await until(lambda: deaths.replicas[0].received)
    client = get_engine_client()
    for _ in range(4):
        lost, replica = deaths.replicas[-1], await deaths.next(is_registered=False)
        await until(lambda replica=replica: replica.received)
        (flight,) = client.flights
        assert flight.attempts_without_output == 2
        await deaths.tell(lost)
        await until(lambda flight=flight: flight.attempts_without_output == 1)
    await deaths.next(die_after=None)
    assert text_of(await read(exchange)) == expected_text(tokenizer)


async def test_a_request_runs_alone_while_what_became_of_two_replicas_is_not_known(
    gateway: Gateway, deaths: Deaths
) -> None:
    """They may have died over it in company, and a third would be one too many. What is told of
    them then counts by how it ran there.
    """
    await deaths.next()
    exchange = start(gateway)
    await until(lambda: deaths.replicas[0].received)
    (flight,) = get_engine_client().flights
    for _ in range(2):
        replica = await deaths.next(is_registered=False)
        await until(lambda replica=replica: replica.received)
    received = [replica.received[-1] for replica in deaths.replicas]
    assert [request.isolated for request in received] == [False, False, True]
    assert flight.attempts_without_output == 3
    for index, reported_replica in enumerate(deaths.replicas[:2], start=1):
        await deaths.tell(reported_replica, "it", "another")
        await until(lambda index=index: flight.shared_crashes == index)
    assert flight.attempts_without_output == 1
    await exchange.leave()


async def test_a_replica_that_stands_still_says_over_which_requests(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So an endless step is the fault of nobody who wasn't in it."""
    replica = gateway.fake(token_delay=600)
    async with gateway.serving(replica):
        exchange = start(gateway)
        client = get_engine_client()
        await until(lambda: client.flights and client.flights[0].placed)
        (flight,) = client.flights
        for in_flight, fruitless, in_company in (
            ([], 0, 0),
            (["another"], 0, 0),
            (["it", "b"], 0, 1),
        ):
            registered_response = client.fleet.get(replica.replica_id)
            assert registered_response is not None
            ids = [flight.engine_id if word == "it" else word for word in in_flight]
            registered_response.heartbeat.held = ids
            with monkeypatch.context() as patch:
                patch.setattr(type(registered_response), "stalled", True)
                await client.watchman.check()
            assert (flight.placed, flight.shared_crashes) == (False, in_company)
            assert flight.attempts_without_output == fruitless
            await client.watchman.check()
            assert flight.placed
        await exchange.leave()


async def test_replicas_that_were_only_slow_are_no_fault_of_a_request(
    gateway: Gateway, settings: Any
) -> None:
    """On a machine that is slow everywhere a stream wanders, and isn't given up."""
    settings.QUIRE = settings.QUIRE.replace(max_attempts=2)
    async with gateway.fake(token_delay=600), gateway.fake(token_delay=600):
        await gateway.refresh()
        exchange = start(gateway)
        client = get_engine_client()
        await until(lambda: client.flights and client.flights[0].placed)
        (flight,) = client.flights
        for moves in range(1, 6):
            remaining_response = client.fleet.get(flight.replica_id)
            assert remaining_response is not None
            remaining_response.changed_at -= protocol.HEARTBEAT_TIMEOUT_S
            await client.watchman.check()
            assert flight.attempt == moves + 1
            initial = remaining_response.heartbeat.at
            # It's heard again.
            while (
                remaining_response := client.fleet.get(remaining_response.heartbeat.replica_id)
            ) and (remaining_response.heartbeat.at == initial):
                await asyncio.sleep(protocol.HEARTBEAT_INTERVAL_S / 5)
                await gateway.refresh()
        assert client.flights == [flight]
        assert flight.attempts_without_output <= 1
        await exchange.leave()


async def test_a_stream_that_gets_on_outlives_more_replicas_than_a_request_may_kill(
    gateway: Gateway, tokenizer: Tokenizer, settings: Any
) -> None:
    settings.QUIRE = settings.QUIRE.replace(max_attempts=2)
    async with contextlib.AsyncExitStack() as stack:
        replica = await stack.enter_async_context(gateway.fake(die_after=10))
        await gateway.refresh()
        exchange = start(gateway)
        for number in range(5):
            await until_dead(replica)
            lost, die_after = replica, 10 if number < 4 else None
            replica = await stack.enter_async_context(gateway.fake(die_after=die_after))
            await gateway.refresh()
            await tell_of_death(gateway, lost)
            await expire(gateway, lost)
        events = await read(exchange)
    assert text_of(events) == expected_text(tokenizer)
