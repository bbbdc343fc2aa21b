"""Requests through adapters, and who makes them."""

from __future__ import annotations

import re
from typing import Any

from inference.edge.handler import GatewayHandler
from inference.engine_client.client import get_engine_client
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tenants.models import Tenant
from tests.inference.asgi_client import AsgiClient
from tests.inference.conftest import Gateway


def newcomer(name: str = "Rival", **key: Any) -> tuple[Tenant, AsgiClient]:
    tenant = actions.create_tenant(actor=SYSTEM_ACTOR, name=name)
    return tenant, client_of(tenant, **key)


def client_of(tenant: Tenant, **key: Any) -> AsgiClient:
    new_key = actions.create_key(actor=SYSTEM_ACTOR, tenant=tenant, name="k", **key)
    return AsgiClient(GatewayHandler(), new_key.secret)


def chat(model: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hello"}]
    return {"model": model, "messages": messages, "max_tokens": 3, **fields}


async def ask(client: AsgiClient, model: str, **fields: Any) -> Any:
    return await client.post("/v1/chat/completions", chat(model, **fields))


async def digest_of(client: AsgiClient, model: str, **fields: Any) -> str:
    reply = await ask(client, model, **fields)
    assert reply.status == 200, reply.body
    return reply.headers["x-quire-adapter"]


async def cancelled_midway(gateway: Gateway, body: dict[str, Any]) -> str:
    """Read a few events of a stream and leave it; the id of the last one."""
    exchange = gateway.client.open("POST", "/v1/chat/completions", body)
    seen = b""
    await exchange.head()
    async for chunk in exchange.chunks():
        seen += chunk
        if seen.count(b"\n\n") >= 5:
            break
    await exchange.leave()
    await gateway.usage()
    await get_engine_client().journal.save()
    full = seen[: seen.rfind(b"\n\n") + 2]
    last: bytes = re.findall(rb"^id: (.*)$", full, re.MULTILINE)[-1]
    return last.decode()
