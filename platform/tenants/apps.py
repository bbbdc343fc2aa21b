"""The tenants app: tenants, their members and keys, and the audit log."""

from django.apps import AppConfig
from django.db.models.signals import post_migrate


class TenantsConfig(AppConfig):
    """Tenants, keys, audit."""

    name = "tenants"
    verbose_name = "Tenants and keys"

    def ready(self) -> None:
        """Protect the audit log after each migration; register tenant data."""
        from tenants.tenant_data import register_data_kinds

        post_migrate.connect(_guard, sender=self, dispatch_uid="tenants.audit")
        register_data_kinds()


def _guard(using: str, **_: object) -> None:
    from tenants.audit import guard_audit_log

    guard_audit_log(using)
