"""A caller without limits."""

from tenants.caller import Caller

CALLER = Caller(
    tenant_id=1,
    tenant="acme",
    key_id=2,
    user_id=None,
    cache_namespace="",
    weight=1.0,
    max_priority=0,
    scopes=frozenset(),
    requests_per_minute=None,
    tokens_per_minute=None,
)
