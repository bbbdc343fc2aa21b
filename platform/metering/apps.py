"""The app of what was used: rate limits and the usage ledger."""

from django.apps import AppConfig


class MeteringConfig(AppConfig):
    """Rate limits, usage spool, usage ledger."""

    name = "metering"
    verbose_name = "Usage"
