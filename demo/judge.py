"""Says whether an answer is right."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from demo.generator.example import Example

STORY_WORDS = 60
BRIEF_WORDS = 6


def right(example: Example, answer: str) -> bool:
    """Whether the answer is the one that was asked for."""
    return JUDGES[example.check](example, answer)


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.casefold())


def _has(text: str, needle: str) -> bool:
    """Whether the needle's words stand in the text, side by side and in order."""
    return f" {' '.join(_words(needle))} " in f" {' '.join(_words(text))} "


def _needles(example: Example, answer: str) -> bool:
    return all(_has(answer, needle) for needle in example.needles)


def _number(example: Example, answer: str) -> bool:
    """The last number is the result: the ones before it are the question's."""
    return re.findall(r"\d+", answer)[-1:] == list(example.needles)


def _brief(example: Example, answer: str) -> bool:
    return _needles(example, answer) and len(_words(answer)) <= BRIEF_WORDS


def _story(example: Example, answer: str) -> bool:
    told = answer if example.plain is None else example.plain[0] + answer
    return _needles(example, told) and len(_words(told)) >= STORY_WORDS


def _tool_call(example: Example, answer: str) -> bool:
    """Exactly one call, of the right function with the right arguments."""
    found = re.fullmatch(r"\s*<tool_call>\n(.*)\n</tool_call>\s*", answer, re.DOTALL)
    if found is None:
        return False
    try:
        return json.loads(found[1]) == example.expect
    except json.JSONDecodeError:
        return False


JUDGES: dict[str, Callable[[Example, str], bool]] = {
    "words": _needles,
    "number": _number,
    "brief": _brief,
    "story": _story,
    "tool_call": _tool_call,
}
