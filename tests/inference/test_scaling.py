"""vLLM's endpoints for data parallelism, whose ranks are replicas."""

from __future__ import annotations

import asyncio

import pytest

from catalog.models import ServedModel
from common.db import run_in_db_thread
from tests.inference.adapter_requests import client_of
from tests.inference.conftest import Gateway

pytestmark = [pytest.mark.django_db(transaction=True)]


async def test_replicas_are_added_and_the_answer_comes_once_they_are_ready(
    gateway: Gateway,
) -> None:
    operator = await run_in_db_thread(
        client_of, gateway.rows.tenant, scopes=["operator", "inference"]
    )
    first, second = gateway.fake(), gateway.fake()
    async with gateway.serving(first):
        assert (await operator.get("/get_world_size")).json() == {"world_size": 1}
        settled = await operator.post("/is_scaling_elastic_ep")
        assert settled.json() == {"is_scaling_elastic_ep": False}
        late = await operator.post(
            "/scale_elastic_ep", {"new_data_parallel_size": 2, "drain_timeout": 1}
        )
        assert late.status == 503
        assert "doesn't have 2 ready replicas after 1 s" in late.error["message"]
        scaling = await operator.post("/is_scaling_elastic_ep")
        assert scaling.json() == {"is_scaling_elastic_ep": True}
        waiting = asyncio.create_task(
            operator.post("/scale_elastic_ep", {"new_data_parallel_size": 2})
        )
        async with gateway.serving(second):
            scaled = await waiting
            assert scaled.json() == {"message": "Scaled to 2 data parallel engines"}
            assert (await operator.get("/get_world_size")).json() == {"world_size": 2}
            one = await operator.get("/get_world_size?include_dp=false")
            assert one.json() == {"world_size": 1}
            early = await operator.post(
                "/scale_elastic_ep", {"new_data_parallel_size": 1, "drain_timeout": 1}
            )
            assert early.status == 503  # both are still there
        fewer = await operator.post("/scale_elastic_ep", {"new_data_parallel_size": 1})
        assert fewer.status == 200
    (row,) = [row async for row in ServedModel.objects.all()]
    assert row.num_replicas == 1


async def test_a_size_is_refused_by_its_name_and_others_may_not_scale(gateway: Gateway) -> None:
    operator = await run_in_db_thread(client_of, gateway.rows.tenant, scopes=["operator"])
    async with gateway.serving(gateway.fake()):
        refused = await operator.post("/scale_elastic_ep", {"new_data_parallel_size": 0})
        assert (refused.status, refused.error["param"]) == (400, "new_data_parallel_size")
        unknown = await operator.post(
            "/scale_elastic_ep", {"new_data_parallel_size": 2, "model": "nobody"}
        )
        assert unknown.status == 404
        stranger = await gateway.client.post("/scale_elastic_ep", {"new_data_parallel_size": 2})
        assert stranger.status == 403
