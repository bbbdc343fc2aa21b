"""The one way to change people, tenants, members, service accounts and keys.

Each function takes keywords alone, `actor` (a user or `tenants.actors.Actor`) among them, checks
what the actor may do, and writes the change and its audit row in one transaction; signals of
`tenants.signals` follow on commit. Refusals are `QuireError`s.
"""

from tenants.actions.invitations import (
    NewInvitation,
    accept_invitation,
    find_invitation,
    invite,
    join_by_invitation,
    revoke_invitation,
)
from tenants.actions.keys import NARROWED, NewKey, create_key, end_sessions, revoke_key, rotate_key
from tenants.actions.members import (
    add_member,
    change_role,
    create_service_account,
    remove_member,
    retire_service_account,
    update_service_account,
)
from tenants.actions.tenants import (
    LIMITS,
    OWN,
    begin_export,
    create_tenant,
    erase_tenant,
    remove_data,
    remove_requested,
    rotate_cache_salt,
    set_tenant_active,
    update_tenant,
)
from tenants.actions.users import (
    create_user,
    delete_user,
    set_password,
    set_staff_rights,
    update_user,
)

__all__ = [
    "LIMITS",
    "NARROWED",
    "OWN",
    "NewInvitation",
    "NewKey",
    "accept_invitation",
    "add_member",
    "begin_export",
    "change_role",
    "create_key",
    "create_service_account",
    "create_tenant",
    "create_user",
    "delete_user",
    "end_sessions",
    "erase_tenant",
    "find_invitation",
    "invite",
    "join_by_invitation",
    "remove_data",
    "remove_member",
    "remove_requested",
    "retire_service_account",
    "revoke_invitation",
    "revoke_key",
    "rotate_cache_salt",
    "rotate_key",
    "set_password",
    "set_staff_rights",
    "set_tenant_active",
    "update_service_account",
    "update_tenant",
    "update_user",
]
