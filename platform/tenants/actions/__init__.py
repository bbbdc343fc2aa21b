"""The only functions that change users, tenants, members, service accounts and keys.

Each function takes only keyword arguments, including `actor` (a user or `tenants.actors.Actor`),
checks the actor's permissions, and writes the change and its audit row in one transaction; the
signals of `tenants.signals` follow on commit. Refusals are `QuireError`s.
"""

from tenants.actions.invitations import (
    NewInvitation,
    accept_invitation,
    get_open_invitation,
    invite,
    revoke_invitation,
    sign_up_with_invitation,
)
from tenants.actions.keys import (
    KEY_LIMIT_FIELDS,
    NewKey,
    create_key,
    end_sessions,
    revoke_key,
    rotate_key,
)
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
    OWNER_FIELDS,
    create_tenant,
    erase_tenant,
    erase_tenant_data,
    log_export,
    rotate_cache_salt,
    run_pending_erasures,
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
    "KEY_LIMIT_FIELDS",
    "LIMITS",
    "OWNER_FIELDS",
    "NewInvitation",
    "NewKey",
    "accept_invitation",
    "add_member",
    "change_role",
    "create_key",
    "create_service_account",
    "create_tenant",
    "create_user",
    "delete_user",
    "end_sessions",
    "erase_tenant",
    "erase_tenant_data",
    "get_open_invitation",
    "invite",
    "log_export",
    "remove_member",
    "retire_service_account",
    "revoke_invitation",
    "revoke_key",
    "rotate_cache_salt",
    "rotate_key",
    "run_pending_erasures",
    "set_password",
    "set_staff_rights",
    "set_tenant_active",
    "sign_up_with_invitation",
    "update_service_account",
    "update_tenant",
    "update_user",
]
