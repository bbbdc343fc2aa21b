"""A second tenant, for whom nothing of the first exists."""

from __future__ import annotations

from inference.edge.handler import GatewayHandler
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tests.inference.asgi_client import AsgiClient


def stranger(name: str = "Strangers") -> AsgiClient:
    """A client with a key of another tenant. Touches the database: call it in a thread."""
    tenant = actions.create_tenant(actor=SYSTEM_ACTOR, name=name)
    key = actions.create_key(actor=SYSTEM_ACTOR, tenant=tenant, name="test")
    return AsgiClient(GatewayHandler(), key.secret)
