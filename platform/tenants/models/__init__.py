"""Users, tenants, memberships, invitations, service accounts, API keys, audit entries."""

from tenants.models.api_key import ApiKey
from tenants.models.audit_entry import ActorKind, AuditEntry
from tenants.models.invitation import Invitation
from tenants.models.membership import Membership, Role
from tenants.models.service_account import ServiceAccount
from tenants.models.tenant import Tenant
from tenants.models.user import User

__all__ = [
    "ActorKind",
    "ApiKey",
    "AuditEntry",
    "Invitation",
    "Membership",
    "Role",
    "ServiceAccount",
    "Tenant",
    "User",
]
