"""Batches whose requests go through adapters."""

from __future__ import annotations

import pytest

from adapters import actions as adapter_actions
from adapters import cards
from adapters.models import AdapterVersion
from catalog.models import ServedModel
from common.db import run_in_db_thread
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tenants.models import Tenant
from tests.inference.batches.conftest import Batches, request_line
from tests.platform.adapters import checked

pytestmark = pytest.mark.usefixtures("adapter_store")


def live(tenant: Tenant | None, name: str, seed: int) -> AdapterVersion:
    model = ServedModel.objects.get()
    return checked(SYSTEM_ACTOR, tenant, model, name=name, seed=seed, promote=True)


async def test_each_line_is_answered_by_its_own_adapter(batches: Batches) -> None:
    gateway = batches.gateway
    rival = await run_in_db_thread(lambda: actions.create_tenant(actor=SYSTEM_ACTOR, name="Rival"))
    mine = await run_in_db_thread(live, gateway.rows.tenant, "tone", 1)
    theirs = await run_in_db_thread(live, rival, "tone", 2)
    await run_in_db_thread(live, rival, "secret", 3)
    shared = await run_in_db_thread(live, None, "house", 4)
    names = ["tone", "fake:tone", "house", "fake", "secret", "fake:secret"]
    lines = [request_line(n, body={"model": name}) for n, name in enumerate(names)]
    async with gateway.serving(gateway.fake()) as replica:
        done = await batches.run(await batches.create(lines))
    assert done["request_counts"] == {"total": 6, "completed": 4, "failed": 2}
    output = await batches.lines(done["output_file_id"])
    answered = {line["custom_id"]: line["response"]["body"]["model"] for line in output}
    assert answered == {f"r{n}": names[n] for n in range(4)}
    errors = await batches.lines(done["error_file_id"])
    assert {line["response"]["status_code"] for line in errors} == {404}
    used = [request.adapter.digest for request in replica.received if request.adapter]
    assert sorted(used) == sorted([mine.digest, mine.digest, shared.digest])
    assert theirs.digest not in used
    ledger = [(record.adapter, record.adapter_digest) for record in await gateway.usage()]
    expected = [("tone", mine.digest)] * 2 + [("house", shared.digest), ("", "")]
    assert sorted(ledger) == sorted(expected)


async def test_lines_go_by_what_the_name_leads_to_when_they_run(batches: Batches) -> None:
    gateway = batches.gateway
    first = await run_in_db_thread(live, gateway.rows.tenant, "tone", 1)
    batch_ids = [await batches.create([request_line(0, body={"model": "tone"})]) for _ in range(2)]
    async with gateway.serving(gateway.fake()) as replica:
        await batches.run(batch_ids[0])
        second = await run_in_db_thread(live, gateway.rows.tenant, "tone", 2)
        await batches.run(batch_ids[1])
        await run_in_db_thread(
            lambda: adapter_actions.take_offline(actor=SYSTEM_ACTOR, adapter=second.adapter)
        )
        cards.forget()
        gone = await batches.run(await batches.create([request_line(0, body={"model": "tone"})]))
    used = [request.adapter.digest for request in replica.received if request.adapter]
    assert used == [first.digest, second.digest]
    assert gone["request_counts"] == {"total": 1, "completed": 0, "failed": 1}
