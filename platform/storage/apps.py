"""The app of what tenants leave with the installation."""

from django.apps import AppConfig


class StorageConfig(AppConfig):
    """Files, batches, stored responses."""

    name = "storage"
    verbose_name = "Files, batches, responses"

    def ready(self) -> None:
        """Name what is kept of tenants."""
        from storage.tenant_data import register_data_kinds

        register_data_kinds()
