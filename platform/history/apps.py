"""The app of the installation's history: its traffic and its KV pools over time."""

from django.apps import AppConfig


class HistoryConfig(AppConfig):
    """Traffic by tenant, model and adapter, and pools by model, kept for up to 93 days."""

    name = "history"
    verbose_name = "History"

    def ready(self) -> None:
        """Register the tenants' data that this app stores."""
        from history.models import TrafficSample
        from tenants.tenant_data import register_data_kind, simple_kind

        register_data_kind(simple_kind("traffic", TrafficSample))
