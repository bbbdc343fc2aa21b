"""The storage app: tenants' stored objects."""

from django.apps import AppConfig


class StorageConfig(AppConfig):
    """Files, batches, stored responses."""

    name = "storage"
    verbose_name = "Files, batches, responses"

    def ready(self) -> None:
        """Register the kinds of tenant data."""
        from storage.tenant_data import register_data_kinds

        register_data_kinds()
