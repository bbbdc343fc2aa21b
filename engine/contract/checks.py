"""Checks of one value. Each raises `InvalidRequest` that names the field. Torch-free."""

from __future__ import annotations

import math
from typing import Any

from engine.contract.errors import InvalidRequest

INT_LIMIT = 2**31 - 1


def shown(value: Any) -> str:
    """A value for an error message: short, whatever a client sent."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of over 4300 digits; lists in lists in lists
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= 80 else text[:77] + "..."


def number(name: str, value: Any, low: float, high: float, low_open: bool = False) -> None:
    """A finite real number within [low, high] (or (low, high])."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (isinstance(value, float) and not math.isfinite(value)):
        raise InvalidRequest(f"{name} must be a finite number, got {shown(value)}.", param=name)
    if value < low or value > high or (low_open and value == low):
        left = "(" if low_open else "["
        raise InvalidRequest(
            f"{name} must be in {left}{low:g}, {high:g}], got {shown(value)}.", param=name
        )


def integer(name: str, value: Any, low: int, high: int = INT_LIMIT) -> None:
    """An int (no bool) within [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, got {shown(value)}.", param=name)
    if value < low or value > high:
        raise InvalidRequest(f"{name} must be in [{low}, {high}], got {shown(value)}.", param=name)


def token_ids(name: str, ids: Any, limit: int) -> None:
    """A list of at most `limit` token ids."""
    if not isinstance(ids, list) or len(ids) > limit:
        raise InvalidRequest(f"{name} must be a list of at most {limit} token ids.", param=name)
    for token in ids:
        integer(name, token, 0)


def is_unicode(text: str) -> bool:
    """Whether the text can be written as UTF-8: it holds no lone surrogate."""
    return not any("\ud800" <= char <= "\udfff" for char in text)
