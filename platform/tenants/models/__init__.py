"""Users, tenants, memberships, API keys, audit entries."""

from tenants.models.api_key import ApiKey
from tenants.models.audit_entry import AuditEntry
from tenants.models.membership import Membership, Role
from tenants.models.tenant import Tenant
from tenants.models.user import User

__all__ = ["ApiKey", "AuditEntry", "Membership", "Role", "Tenant", "User"]
