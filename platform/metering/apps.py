"""The app of what was used: rate limits and the usage ledger."""

from django.apps import AppConfig


class MeteringConfig(AppConfig):
    """Rate limits, usage spool, usage ledger."""

    name = "metering"
    verbose_name = "Usage"

    def ready(self) -> None:
        """Name what is kept of tenants."""
        from metering.retention import register_all

        register_all()
