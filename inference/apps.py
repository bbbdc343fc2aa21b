"""The Django app of the gateway. It has no models: its state is in Redis and in open streams."""

from collections.abc import Mapping
from typing import Any

from django.apps import AppConfig
from django.core import checks


class InferenceConfig(AppConfig):
    """OpenAI-compatible endpoints, the engine client, the playground's socket."""

    name = "inference"
    verbose_name = "Gateway"

    def ready(self) -> None:
        """Register the checks of our settings."""
        from catalog.setting_checks import register as register_settings_check
        from inference.web.kept_answers import forget_answers
        from tenants.holdings import Holding, register

        checks.register(_check)
        register(Holding("idempotency", erase=forget_answers))
        register_settings_check(_check_parser_names)
        register_settings_check(_check_io_processor)


def _check_parser_names(settings: Mapping[str, Any]) -> None:
    if settings.get("tool_call_parser") or settings.get("reasoning_parser"):
        from inference.parser_names import check_parser_names  # all parsers, see above

        check_parser_names(settings)


def _check_io_processor(settings: Mapping[str, Any]) -> None:
    if name := settings.get("io_processor_plugin"):
        from engine.contract.io_processor import named_point

        named_point(name)


def _check(**options: Any) -> list[checks.CheckMessage]:
    from inference.checks import check_gateway  # all parsers, which most commands don't need

    return check_gateway(**options)
