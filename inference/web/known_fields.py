"""Fields that a schema knows and doesn't support, and those that it doesn't know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from engine.errors import InvalidRequest
from inference.errors import UnsupportedField
from inference.openai.schemas.base import Refused
from inference.settings import gateway_settings

#: How a chat is rendered is up to the model's template and, where the operator allows it, to
#: requests for chat completions alone. SDKs take `extra_body` apart before they send.
TEMPLATE_FIELDS: dict[str, tuple[Any, ...]] = {
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "extra_body": ({},),
}


def refuse_unsupported(data: Any, unsupported: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise `Refused` for a field in the table with a value that would change something."""
    if not isinstance(data, dict):
        return
    for name in unsupported.keys() & data.keys():
        value = data[name]
        if value is not None and value not in unsupported[name]:
            raise Refused(UnsupportedField(f"'{name}' is not supported.", param=name))


def unknown_fields(body: BaseModel, unsupported: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Fields that nobody knows, by name. Raises `InvalidRequest` in strict mode."""
    extra = body.model_extra or {}
    names = sorted(n for n, value in extra.items() if n not in unsupported and value is not None)
    if names and gateway_settings().strict:
        raise InvalidRequest(
            f"Unrecognized request argument supplied: {names[0][:100]}.",
            param=names[0][:100],
            code="unknown_parameter",
        )
    return names


def in_words_of(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """The same error with the field as the client calls it: `names` by the field's first part."""
    ours = error.param or ""
    for mine, theirs in names.items():
        if ours == mine or ours.startswith((f"{mine}.", f"{mine}[")):
            error.message = error.message.replace(ours, theirs + ours[len(mine) :])
            error.args, error.param = (error.message,), theirs + ours[len(mine) :]
            break
    return error
