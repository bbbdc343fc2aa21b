"""API keys that an operator brings along: `--api-key`."""

from __future__ import annotations

from collections.abc import Sequence

from config.environment import words
from tenants import actions, secrets
from tenants.actors import SYSTEM
from tenants.models import ApiKey, Tenant

NAME = "given with --api-key"


def given_in_environment() -> list[str]:
    """Keys of `QUIRE_API_KEYS`."""
    return words("QUIRE_API_KEYS", [])


def check_given_keys(keys: Sequence[str]) -> None:
    """Raise `InvalidRequest` for a key that is too short or too long, before anything starts."""
    for key in keys:
        secrets.check_given(key)


def ensure_given_keys(keys: Sequence[str]) -> None:
    """Have these keys work for the first tenant; one that is known already stays as it is.

    Raises: `InvalidRequest` for a key that is too short or too long.
    """
    tenant = Tenant.objects.filter(active=True).order_by("pk").first()
    for key in keys:
        known = ApiKey.objects.filter(public_id=secrets.look_up_name(key)).first()
        if tenant is not None and (known is None or known.digest != secrets.digest(key)):
            actions.create_key(actor=SYSTEM, tenant=tenant, name=NAME, secret=key)
