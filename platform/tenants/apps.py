"""The app of who is asking: tenants, their members, their keys, and the audit log."""

from django.apps import AppConfig


class TenantsConfig(AppConfig):
    """Tenants, keys, audit."""

    name = "tenants"
    verbose_name = "Tenants and keys"
