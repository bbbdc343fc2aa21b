"""Guessing API keys: bounded by address, before the database is asked."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from inference.web import authentication as guesses
from inference.web.authentication import FailedKeyLimiter, client_network
from metering.access import RateLimited
from tenants import authentication
from tenants.api_keys import new_key
from tests.inference.asgi_client import AsgiClient
from tests.inference.conftest import Gateway


@pytest.fixture(autouse=True)
def _one_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test may run across the end of a minute, where counts start anew."""
    monkeypatch.setattr(guesses, "WINDOW_S", 10**10)
    monkeypatch.setattr(guesses, "_local", {})


async def guess(gateway: Gateway, number: int) -> int:
    key = new_key(f"{number:010d}")
    return (await AsgiClient(gateway.client.app, key).get("/v1/models")).status


async def test_an_address_that_guesses_is_paused_before_the_database_is_asked(
    gateway: Gateway,
) -> None:
    real = authentication._look_up
    with patch("tenants.authentication._look_up", side_effect=real) as look_up:
        statuses = [await guess(gateway, number) for number in range(guesses.MAX_FAILED_KEYS + 30)]
    assert statuses == [401] * guesses.MAX_FAILED_KEYS + [429] * 30
    assert look_up.call_count == guesses.MAX_FAILED_KEYS


async def test_the_pause_is_told_and_ends(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(guesses.MAX_FAILED_KEYS):
        await guess(gateway, number)
    reply = await AsgiClient(gateway.client.app, "sk-quire-x").get("/v1/models")
    assert reply.error["code"] == "rate_limit_exceeded"
    assert int(reply.headers["retry-after"]) > 0
    monkeypatch.setattr(guesses, "WINDOW_S", 10**9)  # another window
    assert await guess(gateway, 10**6) == 401


async def test_a_key_that_worked_goes_on_behind_an_address_that_guesses(gateway: Gateway) -> None:
    assert (await gateway.client.get("/v1/models")).status == 200
    for number in range(guesses.MAX_FAILED_KEYS + 1):
        await guess(gateway, number)
    with patch.object(authentication._key_cache, "ttl", -1.0):  # it must be looked up again
        assert (await gateway.client.get("/v1/models")).status == 200


async def test_a_wrong_key_that_is_sent_again_and_again_counts_once_a_look_up(
    gateway: Gateway,
) -> None:
    with patch.object(authentication._guesses, "ttl", 60.0):
        client = AsgiClient(gateway.client.app, new_key("0123456789"))
        statuses = {
            (await client.get("/v1/models")).status for _ in range(guesses.MAX_FAILED_KEYS * 2)
        }
    assert statuses == {401}


async def test_gateways_count_together_and_alone_without_redis(
    gateway: Gateway, settings: Any
) -> None:
    guard = FailedKeyLimiter("203.0.113.9")
    for _ in range(guesses.MAX_FAILED_KEYS):
        await guard.count()
    guesses._local.clear()  # another process
    with pytest.raises(RateLimited):
        await guard.check()
    await FailedKeyLimiter("203.0.113.10").check()
    settings.REDIS_URL = "unix:///nowhere/redis.sock"
    isolated = FailedKeyLimiter("203.0.113.11")
    for _ in range(guesses.MAX_FAILED_KEYS):
        await isolated.check()
        await isolated.count()
    with pytest.raises(RateLimited):
        await isolated.check()


@pytest.mark.parametrize(
    ("address", "origin"),
    [
        ("203.0.113.9", "203.0.113.9"),
        ("::ffff:203.0.113.9", "203.0.113.9"),
        ("2001:db8:1:2:aaaa::1", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:bbbb::9", "2001:db8:1:2::/64"),
        ("", "unknown"),
    ],
)
def test_an_ipv6_network_is_one_origin(address: str, origin: str) -> None:
    assert client_network(address) == origin
