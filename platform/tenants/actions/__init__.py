"""The one way to change tenants, members and keys.

Each function takes keywords alone, `actor` (a user or `tenants.actors.Actor`) among them, checks
what the actor may do, and writes the change and its audit row in one transaction; signals of
`tenants.events` follow on commit. Refusals are `QuireError`s.
"""

from tenants.actions.keys import NewKey, create_key, revoke_key, rotate_key
from tenants.actions.members import add_member, change_role, remove_member
from tenants.actions.tenants import (
    LIMITS,
    create_tenant,
    rotate_cache_salt,
    set_tenant_active,
    update_tenant,
)

__all__ = [
    "LIMITS",
    "NewKey",
    "add_member",
    "change_role",
    "create_key",
    "create_tenant",
    "remove_member",
    "revoke_key",
    "rotate_cache_salt",
    "rotate_key",
    "set_tenant_active",
    "update_tenant",
]
