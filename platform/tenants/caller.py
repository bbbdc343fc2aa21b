"""A look-up's two answers: who is asking, or why they are refused."""

from __future__ import annotations

from dataclasses import dataclass, field

from tenants.errors import AuthenticationFailed, PermissionDenied


@dataclass(frozen=True)
class Caller:
    """Who is asking, and what they may have. Set by the server alone.

    Attributes:
        tenant_id, tenant: the tenant's row and slug.
        key_id: the API key, or None for a session. user_id: the session's user, or None.
        cache_namespace: [32] hex; keeps the tenant's KV cache apart.
        weight: > 0, the tenant's share of a busy engine.
        kv_reserved_fraction, kv_max_fraction: of a replica's KV cache; see `EngineRequest`.
        max_priority: >= 0; priorities down to minus this number are allowed.
        scopes: see `tenants.scopes`.
        requests_per_minute, tokens_per_minute: the tenant's own limits; None: the default.
        key_requests_per_minute, key_tokens_per_minute: the key's, within the tenant's; None: none.
    """

    tenant_id: int
    tenant: str
    key_id: int | None
    user_id: int | None
    cache_namespace: str = field(repr=False)
    weight: float
    max_priority: int
    scopes: frozenset[str]
    requests_per_minute: int | None
    tokens_per_minute: int | None
    key_requests_per_minute: int | None = None
    key_tokens_per_minute: int | None = None
    kv_reserved_fraction: float = 0.0
    kv_max_fraction: float = 1.0

    def require(self, scope: str) -> None:
        """Raise `PermissionDenied` (403) unless the caller has the scope."""
        if scope not in self.scopes:
            raise PermissionDenied(
                f"This needs the scope {scope!r}; this key has {', '.join(sorted(self.scopes))}.",
                code="insufficient_scope",
            )


@dataclass(frozen=True)
class Refusal:
    """A look-up's answer that is no caller."""

    message: str
    forbidden: bool = False

    def error(self) -> AuthenticationFailed | PermissionDenied:
        """A fresh exception: one that is raised twice would grow its traceback."""
        if self.forbidden:
            return PermissionDenied(self.message, code="tenant_inactive")
        return AuthenticationFailed(self.message)
