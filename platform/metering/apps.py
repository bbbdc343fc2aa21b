"""The metering app: rate limits and the usage ledger."""

from django.apps import AppConfig


class MeteringConfig(AppConfig):
    """Rate limits, usage spool and usage ledger."""

    name = "metering"
    verbose_name = "Usage"

    def ready(self) -> None:
        """Register the kinds of tenant data."""
        from metering.retention import register_all

        register_all()
