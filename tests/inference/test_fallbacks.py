"""Another model in the place of one that is down, and one that comes back when it's asked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from django.utils import timezone

from catalog import access as catalog_access
from catalog.models import DesiredState, ServedModel
from tenants.models import AuditEntry
from tests.inference.conftest import Gateway

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


async def change(name: str, **values: Any) -> None:
    """In the catalogue, made at once."""

    def write() -> None:
        ServedModel.objects.update_or_create(
            name=name,
            defaults=values,
            create_defaults={
                "source": name,
                "desired_state": DesiredState.LOADED,
                "managed": False,
                **values,
            },
        )

    await asyncio.to_thread(write)
    catalog_access.clear_cache()


async def ask(gateway: Gateway, **more: Any) -> Any:
    return await gateway.client.request("POST", "/v1/chat/completions", {**CHAT, **more})


async def test_the_first_fallback_that_answers_does_and_says_so(gateway: Gateway) -> None:
    await change("spare", public=True)
    await change("hidden", public=False)
    await change("fake", fallbacks=["hidden", "away", "spare"])
    other = gateway.fake(replica_id="other", model_name="spare")
    secret = gateway.fake(replica_id="secret", model_name="hidden")
    async with gateway.serving(other), gateway.serving(secret):
        answer = await ask(gateway)
        assert answer.status == 200
        assert answer.json()["model"] == "spare"
        assert answer.headers["x-quire-in-place-of"] == "fake"
        (record,) = await gateway.usage()
        assert (record.model, record.in_place_of) == ("spare", "fake")
        tokens = await gateway.client.request(
            "POST", "/tokenize", {"model": "fake", "prompt": "Hi"}
        )
        assert tokens.status == 503  # another model has other tokens


async def test_a_model_that_is_up_answers_itself(gateway: Gateway) -> None:
    await change("spare", public=True)
    await change("fake", fallbacks=["spare"])
    mine, other = gateway.fake(), gateway.fake(replica_id="other", model_name="spare")
    async with gateway.serving(mine), gateway.serving(other):
        answer = await ask(gateway)
    assert answer.json()["model"] == "fake"
    assert "x-quire-in-place-of" not in answer.headers


async def test_without_a_fallback_that_is_up_it_is_503(gateway: Gateway) -> None:
    await change("fake", fallbacks=["spare"])
    await gateway.refresh()
    assert (await ask(gateway)).status == 503


async def test_a_model_that_let_go_comes_back_for_a_request(gateway: Gateway) -> None:
    await change("fake", idle_minutes=5, idle_since=timezone.now(), managed=True)
    waiting = [asyncio.create_task(ask(gateway)) for _ in range(2)]

    def woken() -> bool:
        return ServedModel.objects.filter(name="fake", idle_since=None).exists()

    for _ in range(3000):
        if await asyncio.to_thread(woken):
            break
        await asyncio.sleep(0.02)
    else:
        pytest.fail("nobody woke it")
    async with gateway.serving(gateway.fake()):
        answers = await asyncio.gather(*waiting)
    assert [answer.status for answer in answers] == [200, 200]
    operations = await asyncio.to_thread(
        lambda: list(AuditEntry.objects.filter(action="model.wake").values_list("actor_kind"))
    )
    assert operations == [("system",)]
