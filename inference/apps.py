"""The Django app of the gateway. It has no models: its state is in Redis and in open streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.apps import AppConfig
from django.core import checks
from django.core.checks import CheckMessage, Error

from engine.text.chat_messages import CONTENT_FORMATS
from inference.parsers.registry import reasoning_parsers, tool_parsers
from inference.settings import gateway_settings

# -- What Django looks at before the gateway starts: settings that would only fail at a request.


def check_gateway(**_: Any) -> list[CheckMessage]:
    """Parsers that can't be loaded, and a content format that doesn't exist."""
    found: list[CheckMessage] = []
    registries = {"TOOL_PARSERS": tool_parsers.all, "REASONING_PARSERS": reasoning_parsers.all}
    for number, (name, load) in enumerate(registries.items(), start=1):
        try:
            load()
        except (ImportError, TypeError) as error:
            found.append(Error(f"QUIRE['{name}']: {error}", id=f"inference.E00{number}"))
    chosen = gateway_settings().chat_template_content_format
    if chosen not in CONTENT_FORMATS:
        known = ", ".join(CONTENT_FORMATS)
        message = f"QUIRE['CHAT_TEMPLATE_CONTENT_FORMAT'] must be one of {known}; got {chosen!r}."
        found.append(Error(message, id="inference.E003"))
    return found


class InferenceConfig(AppConfig):
    """OpenAI-compatible endpoints, the engine client, the playground's socket."""

    name = "inference"
    verbose_name = "Gateway"

    def ready(self) -> None:
        """Register the checks of our settings."""
        from catalog.engine_settings import register_settings_validator as register_settings_check
        from inference.web.idempotent_responses import delete_idempotent_responses
        from tenants.tenant_data import TenantDataKind, register_data_kind

        checks.register(_check)
        register_data_kind(TenantDataKind("idempotency", erase=delete_idempotent_responses))
        register_settings_check(_check_parser_names)
        register_settings_check(_check_io_processor)


def _check_parser_names(settings: Mapping[str, Any]) -> None:
    if settings.get("tool_call_parser") or settings.get("reasoning_parser"):
        from inference.parsers.registry import check_parser_names  # all parsers, see above

        check_parser_names(settings)


def _check_io_processor(settings: Mapping[str, Any]) -> None:
    if name := settings.get("io_processor_plugin"):
        from engine.contract.plugins import io_processor_entry_point

        io_processor_entry_point(name)


def _check(**options: Any) -> list[checks.CheckMessage]:

    return check_gateway(**options)
