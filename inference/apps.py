"""The Django app of the gateway. It has no models: its state is in Redis and in open streams."""

from typing import Any

from django.apps import AppConfig
from django.core import checks


class InferenceConfig(AppConfig):
    """OpenAI-compatible endpoints, the engine client, the playground's socket."""

    name = "inference"
    verbose_name = "Gateway"

    def ready(self) -> None:
        """Register the checks of our settings."""
        from inference.web.kept_answers import forget_answers
        from tenants.holdings import Holding, register

        checks.register(_check)
        register(Holding("idempotency", erase=forget_answers))


def _check(**options: Any) -> list[checks.CheckMessage]:
    from inference.checks import check_gateway  # all parsers, which most commands don't need

    return check_gateway(**options)
