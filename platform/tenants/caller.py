"""Results of authentication: a caller, or the reason for a refusal."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from common.errors import AuthenticationFailed, PermissionDenied
from common.outbound_http import Network, is_within


class MediaLimits(NamedTuple):
    """Limits per minute: number of media, their bytes, seconds of decoding. None or 0: no limit."""

    media: int | None = None
    media_bytes: int | None = None
    media_seconds: int | None = None


@dataclass(frozen=True)
class Caller:
    """The caller of a request, with its rights. Only the server sets it.

    Attributes:
        tenant_id, tenant: the tenant's row and slug.
        key_id: the API key, or None for a session. user_id: the session's user, or None.
        cache_namespace: [32] hex; separates the tenant's KV cache from others'.
        weight: > 0, the tenant's share of a busy engine.
        kv_reserved_fraction, kv_max_fraction: of a replica's KV cache; see `EngineRequest`.
        max_priority: >= 0; priorities down to minus this number are allowed.
        scopes: see `tenants.api_keys`.
        requests_per_minute, tokens_per_minute: the tenant's own limits; None: the default.
        key_requests_per_minute, key_tokens_per_minute: the key's, within the tenant's; None: no
            limit.
        media_limits, key_media_limits: the tenant's own, and the key's within them.
        key_family: the first key of those that replaced each other by rotation.
        max_running_requests, key_max_running_requests: maximum concurrency; None: no limit.
        max_context_tokens: of prompt and output; None: the model's.
        models: those that both tenant and key may use; None: all. tenant_models, key_models: the
            two lists that are intersected. endpoints: paths, () for all.
        networks: allowed client networks, () for any.
        store_prompts: whether the tenant stores prompts and answers.
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
    media_limits: MediaLimits = field(default_factory=MediaLimits)
    key_media_limits: MediaLimits = field(default_factory=MediaLimits)
    kv_reserved_fraction: float = 0.0
    kv_max_fraction: float = 1.0
    key_family: int | None = None
    max_running_requests: int | None = None
    key_max_running_requests: int | None = None
    max_context_tokens: int | None = None
    models: frozenset[str] | None = None
    tenant_models: frozenset[str] | None = None
    key_models: frozenset[str] | None = None
    endpoints: tuple[str, ...] = ()
    networks: tuple[Network, ...] = ()
    store_prompts: bool = False

    def can_use_model(self, model: str) -> bool:
        """Whether tenant and key may use the model."""
        return self.models is None or model in self.models

    def can_use_adapter(self, names: Collection[str], base: str) -> bool:
        """Whether tenant and key may use an adapter with these names.

        A tenant that may use the base model may use its adapters; a key's list is exact.
        """
        by_tenant = self.tenant_models is None or not self.tenant_models.isdisjoint([*names, base])
        return by_tenant and (self.key_models is None or not self.key_models.isdisjoint(names))

    def check_endpoint(self, path: str) -> None:
        """Raise `PermissionDenied` (403) for a path that the key isn't valid for."""
        if self.endpoints and not any(
            path == allowed or path.startswith(allowed.rstrip("/") + "/")
            for allowed in self.endpoints
        ):
            raise PermissionDenied(
                f"This API key may not use {path[:100]}.", code="endpoint_not_allowed"
            )

    def check_address(self, address: str) -> None:
        """Raise `PermissionDenied` (403) for a client address outside the key's networks."""
        if self.networks and not is_within(address, self.networks):
            raise PermissionDenied(
                "This API key may not be used from your address.", code="address_not_allowed"
            )

    def require(self, scope: str) -> None:
        """Raise `PermissionDenied` (403) unless the caller has the scope."""
        if scope not in self.scopes:
            holder = "your role" if self.key_id is None else "this key"
            raise PermissionDenied(
                f"This needs the scope {scope!r}; {holder} has {', '.join(sorted(self.scopes))}.",
                code="insufficient_scope",
            )


@dataclass(frozen=True)
class AuthFailure:
    """A result of authentication that refuses the request."""

    message: str
    forbidden: bool = False

    def error(self) -> AuthenticationFailed | PermissionDenied:
        """A new exception each time: raising one twice would extend its traceback."""
        if self.forbidden:
            return PermissionDenied(self.message, code="tenant_inactive")
        return AuthenticationFailed(self.message)
