"""The admin's pages for users, tenants, members, keys and the audit log."""

from tenants.admin.api_key import ApiKeyAdmin
from tenants.admin.audit_entry import AuditEntryAdmin
from tenants.admin.membership import MembershipAdmin
from tenants.admin.tenant import TenantAdmin
from tenants.admin.user import UserAdmin

__all__ = ["ApiKeyAdmin", "AuditEntryAdmin", "MembershipAdmin", "TenantAdmin", "UserAdmin"]
