"""What Django looks at before the gateway starts: settings that would only fail at a request."""

from __future__ import annotations

from typing import Any

from django.core.checks import CheckMessage, Error

from engine.text.messages import CONTENT_FORMATS
from inference.reasoning import reasoning_parsers
from inference.settings import gateway_settings
from inference.tools import tool_parsers


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
