"""Images and audio have prices of their own, besides those of tokens."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from common.db import run_in_db_thread
from inference.generation.takeover import _remaining_request
from inference.request.job import Usage
from metering import admission
from metering.access import AdmissionRequest, BudgetSpent, admit, settle
from metering.drain import drain_once
from metering.models import UsageDay, UsageEntry
from metering.open_requests import OpenRequest
from metering.redis_scripts import redis_key, sync_client
from tests.platform.budgets import budget, caller, enter, price, state, used
from tests.platform.conftest import World

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("with_redis")]

PRICES = {
    **dict.fromkeys(("input_per_million", "cached_per_million", "output_per_million"), "0"),
    "per_image": "0.002",
    "per_audio_minute": "0.006",
}


async def test_a_budget_holds_what_images_and_audio_cost(world: World) -> None:
    await run_in_db_thread(lambda: price(**PRICES))
    of = await run_in_db_thread(lambda: budget(world, amount="0.005"))
    got = await enter(caller(world), request_id="r", images=[2], prompts=[10])
    assert (await state(of)).reserved_nanos == 4_000_000
    (name,) = sync_client().keys(redis_key("budget:*"))
    sync_client().delete(name, redis_key("reservation:r"))  # a counter that is made anew has it too
    await enter(caller(world), request_id="a", audio_ms=[10_000], prompts=[10])
    assert (await state(of)).reserved_nanos == 4_000_000 + 1_000_000
    admission.WAIT_TIMEOUT_S, initial = 0.0, admission.WAIT_TIMEOUT_S
    try:
        with pytest.raises(BudgetSpent):
            await enter(caller(world), audio_ms=[1], prompts=[10])
    finally:
        admission.WAIT_TIMEOUT_S = initial
    cost = got.prices.cost_nanos(10, 0, 10) + got.prices.media_nanos(2, 0)
    await settle(used(world, "r", got, 10, 10, images=2, cost_nanos=cost), got)
    now = await state(of)
    assert (now.nanos, now.reserved_nanos) == (4_000_000, 1_000_000)


async def test_the_rest_of_a_stream_pays_for_no_image_again(world: World) -> None:
    await run_in_db_thread(lambda: price(**PRICES))
    of = await run_in_db_thread(lambda: budget(world, amount="0.005"))
    who = caller(world)
    got = await enter(who, request_id="r", images=[2], prompts=[10])
    await settle(used(world, "r", got, 10, 1, images=2, cost_nanos=4_000_000), got)
    full_request = AdmissionRequest(
        request_id="r",
        endpoint="chat",
        model="m",
        prompt_tokens=10,
        max_output_tokens=10,
        prompts=[10],
        images=[2],
        audio_ms=[60_000],
    )
    taken_over: Any = SimpleNamespace(
        billed=Usage(prompt_tokens=10, completion_tokens=1),
        ledger_id="r.1",
        position=SimpleNamespace(stream="r"),
    )
    await admit(who, _remaining_request(full_request, taken_over))
    now = await state(of)
    assert (now.nanos, now.reserved_nanos) == (4_000_000, 0)


async def test_sums_count_images_and_audio(world: World) -> None:
    await run_in_db_thread(lambda: price(**PRICES))
    for number in range(2):
        name = f"r{number}"
        got = await enter(caller(world), request_id=name, images=[1], prompts=[10])
        await settle(used(world, name, got, 10, 10, images=1, audio_ms=1500), got)
    await run_in_db_thread(drain_once, sync_client())
    day = await run_in_db_thread(UsageDay.objects.get)
    assert (day.images, day.audio_ms) == (2, 3000)
    entries = await run_in_db_thread(lambda: list(UsageEntry.objects.all()))
    assert [(entry.images, entry.audio_ms) for entry in entries] == [(1, 1500)] * 2


@pytest.mark.parametrize(
    ("counts", "billed"),
    [
        ({"r-0/0": 3, "r-1/0": 1}, (3, 5000, 6_500_000)),
        ({"r-1/0": 1}, (2, 0, 4_000_000)),
    ],
    ids=["both prompts", "one prompt"],
)
def test_a_dead_gateways_media_are_billed_once(
    counts: dict[str, int], billed: tuple[int, int, int]
) -> None:
    request = OpenRequest(
        request_id="r",
        tenant_id=1,
        key_id=None,
        user_id=None,
        endpoint="chat",
        model="m",
        prompts=[3, 4],
        images=[1, 2],
        audio_ms=[5000, 0],
        started_at=time.time(),
        stream=True,
        rates=(0, 0, 0, 2_000_000, 6_000_000),
        outbox="",
    )
    record = OpenRequest.decode(request.encode()).record(counts, time.time(), was_delivered=True)
    assert (record.images, record.audio_ms, record.cost_nanos) == billed
