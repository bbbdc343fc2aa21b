"""The Django app of the gateway. It has no models: its state is in Redis and in open streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core import checks
from django.core.checks import CheckMessage, Error
from django.core.exceptions import ImproperlyConfigured

from engine.contract.errors import InvalidRequest
from inference.parsers.plugins import ParserRegistry
from inference.parsers.registry import reasoning_parsers, tool_parsers


def check_gateway(**_: Any) -> list[CheckMessage]:
    """Check that the configured parsers can be loaded."""
    messages: list[CheckMessage] = []
    registries: tuple[ParserRegistry[Any], ...] = (tool_parsers, reasoning_parsers)
    for number, registry in enumerate(registries, start=1):
        try:
            registry.all()
        except (ImportError, TypeError) as error:
            messages.append(Error(f"QUIRE.{registry.kind}: {error}", id=f"inference.E00{number}"))
    return messages


class InferenceConfig(AppConfig):
    """OpenAI-compatible endpoints, the engine client, the playground's socket."""

    name = "inference"
    verbose_name = "Gateway"

    def ready(self) -> None:
        """Register the checks of our settings."""
        from catalog.engine_settings import register_settings_validator
        from tenants.tenant_data import TenantDataKind, register_data_kind

        _check_template_kwargs()
        checks.register(_check)
        register_data_kind(TenantDataKind("idempotency", erase=_delete_idempotent_responses))
        register_settings_validator(_check_parser_names)
        register_settings_validator(_check_io_processor)


def _delete_idempotent_responses(tenant: Any) -> int:
    from inference.web.idempotency import delete_idempotent_responses

    return delete_idempotent_responses(tenant)


def _check_template_kwargs() -> None:
    """Raise ImproperlyConfigured for variables that chat templates must not be passed."""
    if kwargs := settings.QUIRE.default_chat_template_kwargs:
        from engine.text.chat_messages import check_template_kwargs

        try:
            check_template_kwargs(kwargs)
        except InvalidRequest as error:
            raise ImproperlyConfigured(
                f"QUIRE_DEFAULT_CHAT_TEMPLATE_KWARGS: {error.message}"
            ) from error


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
