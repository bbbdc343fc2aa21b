"""The app of what the installation did: its traffic and its pools over time."""

from django.apps import AppConfig


class HistoryConfig(AppConfig):
    """Traffic by tenant, model and adapter, and pools by model: from 10 seconds to 90 days."""

    name = "history"
    verbose_name = "History"

    def ready(self) -> None:
        """Name what is kept of tenants."""
        from history.models import TrafficSample
        from tenants.tenant_data import register_data_kind, simple_kind

        register_data_kind(simple_kind("traffic", TrafficSample))
