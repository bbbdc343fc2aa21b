"""A request's texts and token ids, as lists."""

from __future__ import annotations

from typing import Any

from engine.contract.errors import InvalidRequest
from inference.settings import gateway_settings

Item = str | list[int]


def split_input(value: Any) -> list[Item]:
    """A text, texts, token ids or lists of token ids, as a list of items.

    Raises `InvalidRequest` for something else, nothing, or too many.
    """
    if isinstance(value, list) and value and not isinstance(value[0], str | list):
        value = [value]
    if isinstance(value, list) and value and isinstance(value[0], list):
        _check_count(value, "input")
        if not all(isinstance(item, list) for item in value):
            raise _wrong_type("input", "a string, strings, token ids or lists of token ids")
        return value
    return list(texts_of(value, "input"))


def texts_of(value: Any, param: str) -> list[str]:
    """One text or several, as a list. Raises `InvalidRequest` as `split_input` does."""
    if value is None:
        raise InvalidRequest(
            f"Missing required parameter: '{param}'.",
            param=param,
            code="missing_required_parameter",
        )
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise _wrong_type(param, "a string or a list of strings")
    _check_count(texts, param)
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise _wrong_type(f"{param}[{place}]", "a string")
        if not text:
            name = param if isinstance(value, str) else f"{param}[{place}]"
            raise InvalidRequest(f"{name} must not be empty.", param=name)
    return texts


def _check_count(items: list[Any], param: str) -> None:
    limit = gateway_settings().max_prompts
    if not items:
        raise InvalidRequest(f"{param} must not be empty.", param=param)
    if len(items) > limit:
        raise InvalidRequest(
            f"{param} holds {len(items)} entries; at most {limit} may be sent at once.", param=param
        )


def _wrong_type(param: str, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"{param} must be {wanted}.", param=param, code="invalid_type")
