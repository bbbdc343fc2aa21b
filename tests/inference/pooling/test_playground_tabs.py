"""Completions, embeddings and reranking in the playground, with a session in place of a key."""

from __future__ import annotations

from typing import Any

import numpy as np
from django.test import AsyncClient

from common.db import run_in_db_thread
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tenants.models import Role, User
from tests.inference.conftest import Gateway
from tests.inference.pooling.conftest import Serve

RUN = "/console/api/run/"


async def logged_in(gateway: Gateway, role: Role | None, **options: Any) -> AsyncClient:
    """A browser of a user with this role in the gateway's tenant, None for a stranger's."""

    def create() -> User:
        user = User.objects.create(username=f"user-{role}")
        if role is None:
            actions.create_tenant(actor=SYSTEM_ACTOR, name="Rival", owner=user)
        else:
            actions.add_member(actor=SYSTEM_ACTOR, tenant=gateway.rows.tenant, user=user, role=role)
        return user

    client = AsyncClient(**options)
    await client.aforce_login(await run_in_db_thread(create))
    return client


async def post(client: AsyncClient, kind: str, tenant: str = "", **body: Any) -> Any:
    """The status, and the JSON."""
    address = f"{RUN}{kind}" + (f"?tenant={tenant}" if tenant else "")
    reply = await client.post(address, body, content_type="application/json")
    return reply.status_code, reply.json()


async def test_a_member_embeds_with_the_session(gateway: Gateway, serve: Serve) -> None:
    member = await logged_in(gateway, Role.MEMBER)
    texts = ["A heron.", "An invoice."]
    async with serve("embed"):
        status, answer = await post(member, "embeddings", model="embed", input=texts)
        assert status == 200, answer
        direct = await gateway.client.post("/v1/embeddings", {"model": "embed", "input": texts})
        for mine, other in zip(answer["data"], direct.json()["data"], strict=True):
            np.testing.assert_allclose(mine["embedding"], other["embedding"], atol=1e-6)


async def test_a_member_ranks_with_the_session(gateway: Gateway, serve: Serve) -> None:
    member = await logged_in(gateway, Role.MEMBER)
    body = {"model": "rank", "query": "Which bird?", "documents": ["A heron.", "An invoice."]}
    async with serve("rank"):
        status, answer = await post(member, "rerank", gateway.rows.tenant.slug, **body)
        assert status == 200, answer
        assert len(answer["results"]) == 2


async def test_a_member_completes_with_the_session(gateway: Gateway) -> None:
    member = await logged_in(gateway, Role.MEMBER)
    async with gateway.serving(gateway.fake(eos_after=8)):
        status, answer = await post(member, "completions", model="fake", prompt="Once")
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] > 0
    assert [record.tenant_id for record in await gateway.usage()] == [gateway.rows.tenant.pk]


async def test_a_completion_streams_to_the_session(gateway: Gateway) -> None:
    member = await logged_in(gateway, Role.MEMBER)
    body = {"model": "fake", "prompt": "Once", "stream": True}
    async with gateway.serving(gateway.fake(eos_after=8)):
        reply = await member.post(f"{RUN}completions", body, content_type="application/json")
        assert reply["Content-Type"].startswith("text/event-stream")
        text = b"".join([part async for part in reply.streaming_content]).decode()  # type: ignore[union-attr]
    events = [line for line in text.splitlines() if line.startswith("data: ")]
    assert len(events) > 2
    assert events[-1] == "data: [DONE]"
    assert [record.tenant_id for record in await gateway.usage()] == [gateway.rows.tenant.pk]


async def test_viewers_strangers_and_other_sites_run_nothing(gateway: Gateway) -> None:
    slug = gateway.rows.tenant.slug
    body = {"model": "fake", "prompt": "Once"}
    async with gateway.serving(gateway.fake(eos_after=8)):
        for client, tenant, expected in (
            (AsyncClient(), "", 401),
            (await logged_in(gateway, Role.VIEWER), slug, 403),
            (await logged_in(gateway, None), slug, 403),
            (await logged_in(gateway, Role.MEMBER, enforce_csrf_checks=True), slug, 403),
        ):
            reply = await client.post(
                f"{RUN}completions?tenant={tenant}", body, content_type="application/json"
            )
            assert reply.status_code == expected, reply.content
    assert await gateway.usage() == []
