"""Going on with a response's events where a worker that died had stopped.

The answer is made again from its beginning, with the same seed and so with the same tokens. What
was told already is passed over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from engine.contract.errors import QuireError
from inference.parsing import Part
from inference.parsing.parts import BEGINNINGS
from inference.responses.namespaces import name_for_model
from inference.responses.output import GROWS, Event

_KINDS = {"message": "content", "reasoning": "reasoning"}
_CALLS = {"function_call": ("call", "arguments"), "custom_tool_call": ("custom", "input")}
#: Events that tell of a call's growth, and of what in it.
_GROWTH = {f"response.{kind}_{grows}.delta": grows for kind, grows in GROWS.items()}


class StreamLost(QuireError):
    """What the new worker makes is not what the old one had told."""

    status = 503
    code = "stream_lost"


def told_items(events: Iterable[Event]) -> list[dict[str, Any]]:
    """The output items as far as their events tell."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            items.append(event["item"])
        elif kind == "response.output_item.done":
            items[event["output_index"]] = event["item"]
        elif kind == "response.content_part.added":
            items[event["output_index"]]["content"].append(event["part"])
        elif kind in _GROWTH:
            items[event["output_index"]][_GROWTH[kind]] += event["delta"]
        elif kind.endswith("_text.delta"):
            items[event["output_index"]]["content"][0]["text"] += event["delta"]
    return items


class PassedOver:
    """Leaves out of a new answer's parts what its items told already."""

    def __init__(self, items: Iterable[dict[str, Any]]) -> None:
        self._told: deque[tuple[str, str]] = deque()
        for item in items:
            if item["type"] in GROWS:
                begins, grows = _CALLS[item["type"]]
                name = name_for_model(item.get("namespace"), item["name"])
                self._told += [(begins, name), (grows, item[GROWS[item["type"]]])]
            else:
                text = "".join(part["text"] for part in item["content"])
                self._told.append((_KINDS[item["type"]], text))

    def rest(self, parts: Iterable[Part]) -> list[Part]:
        """What is new of them. Raises `StreamLost` when the rest is not what was told."""
        return [left for part in parts if (left := self._rest(part)) is not None]

    def _rest(self, part: Part) -> Part | None:
        while self._told:
            kind, text = self._told[0]
            if not text:
                self._told.popleft()
                continue
            length = min(len(text), len(part.text))
            if kind != part.kind or text[:length] != part.text[:length]:
                raise StreamLost("Another worker could not continue the answer.")
            if kind in BEGINNINGS:
                self._told.popleft()
                return None
            self._told[0] = (kind, text[length:])
            if length == len(part.text):
                return None
            part = replace(part, text=part.text[length:])
        return part
