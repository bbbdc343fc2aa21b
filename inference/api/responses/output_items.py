"""Converts a turn's parts to output items, and to the events that stream them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from engine.contract.errors import QuireError
from inference.api.responses.schemas import name_for_model
from inference.parsers.state_machine import START_KINDS, Part
from storage.access import item_id

Event = dict[str, Any]
#: The field of a call that grows while it is streamed, by the type of its item.
GROWS = {"function_call": "arguments", "custom_tool_call": "input"}
_CUSTOM = ("ctc_", "custom_tool_call")


class Output:
    """Builds the items of one response; every method returns the resulting events.

    `public_id`: the response's. `split_names`: see `namespaces.split_names`.

    Attributes:
        items: so far; the last one may be unfinished.
    """

    def __init__(
        self, public_id: str, split_names: Mapping[str, tuple[str, str]] | None = None
    ) -> None:
        self._public_id, self._split_names = public_id, split_names or {}
        self.items: list[dict[str, Any]] = []
        self._open = ""
        self._call = -1

    def go_on_from(self, items: list[dict[str, Any]]) -> None:
        """Continue from items that another worker started; the last one may be unfinished."""
        self.items, last = items, items[-1]
        if last["status"] == "in_progress":
            kinds = {"message": "content", "reasoning": "reasoning"}
            self._open = kinds.get(last["type"], "call")

    def append(self, parts: Iterable[Part], logprobs: list[dict[str, Any]]) -> list[Event]:
        """Add parts in the model's order. `logprobs`: of their tokens, reported with the text."""
        events: list[Event] = []
        for part in parts:
            if part.kind in START_KINDS:
                events += self._begin_call(part)
            elif part.kind in ("arguments", "input"):
                events += self._more_of_call(part)
            else:
                events += self._more_text(part, logprobs if part.kind == "content" else [])
                logprobs = [] if part.kind == "content" else logprobs
        return events

    def end(self, status: str) -> list[Event]:
        """Close the open item; `status` of the last item: "completed" or "incomplete"."""
        events = [] if self.items else self._begin_text("content")
        return events + self._close(status)

    def _new_id(self, prefix: str) -> str:
        """Item id that does not depend on the gateway that writes it."""
        return item_id(prefix, self._public_id, len(self.items))

    def _more_text(self, part: Part, logprobs: list[dict[str, Any]]) -> list[Event]:
        events = []
        if self._open != part.kind:
            events = self._close() + self._begin_text(part.kind)
        content = self.items[-1]["content"][0]
        content["text"] += part.text
        delta: Event = {**self._item_location(), "content_index": 0, "delta": part.text}
        if part.kind == "content":
            content["logprobs"] += logprobs
            delta = {"type": "response.output_text.delta", **delta, "logprobs": logprobs}
        else:
            delta = {"type": "response.reasoning_text.delta", **delta}
        return [*events, delta]

    def _begin_text(self, kind: str) -> list[Event]:
        self._open = kind
        if kind == "content":
            item: dict[str, Any] = {
                "id": self._new_id("msg_"),
                "type": "message",
                "role": "assistant",
            }
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"id": self._new_id("rs_"), "type": "reasoning", "summary": []}
            part = {"type": "reasoning_text", "text": ""}
        item |= {"status": "in_progress", "content": []}
        self.items.append(item)
        events = [self._item_event("added")]
        item["content"].append(part)
        return [*events, self._part_event("added")]

    def _begin_call(self, part: Part) -> list[Event]:
        events = self._close()
        self._open, self._call = "call", part.call
        prefix, kind = ("fc_", "function_call") if part.kind == "call" else _CUSTOM
        namespace, name = self._split_names.get(part.text, ("", part.text))
        self.items.append(
            {
                "id": self._new_id(prefix),
                "type": kind,
                "call_id": part.id,
                **({"namespace": namespace} if namespace else {}),
                "name": name,
                GROWS[kind]: "",
                "status": "in_progress",
            }
        )
        return [*events, self._item_event("added")]

    def _more_of_call(self, part: Part) -> list[Event]:
        item = self.items[-1]
        item[GROWS[item["type"]]] += part.text
        kind = f"response.{item['type']}_{GROWS[item['type']]}.delta"
        return [{"type": kind, **self._item_location(), "delta": part.text}]

    def _close(self, status: str = "completed") -> list[Event]:
        if not self._open:
            return []
        kind, self._open = self._open, ""
        item = self.items[-1]
        item["status"] = status
        if kind == "call":
            grown = GROWS[item["type"]]
            done = {"type": f"response.{item['type']}_{grown}.done", **self._item_location()}
            if grown == "arguments":
                done["name"] = item["name"]
            return [{**done, grown: item[grown]}, self._item_event("done")]
        content = item["content"][0]
        name = "output_text" if kind == "content" else "reasoning_text"
        done = {"type": f"response.{name}.done", **self._item_location(), "content_index": 0}
        done["text"] = content["text"]
        if kind == "content":
            done["logprobs"] = content["logprobs"]
        return [done, self._part_event("done"), self._item_event("done")]

    def _item_location(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _item_event(self, what: str) -> Event:
        item = self.items[-1]
        copy = {**item, "content": list(item["content"])} if "content" in item else dict(item)
        index = len(self.items) - 1
        return {"type": f"response.output_item.{what}", "output_index": index, "item": copy}

    def _part_event(self, what: str) -> Event:
        part = dict(self.items[-1]["content"][0])
        kind = f"response.content_part.{what}"
        return {"type": kind, **self._item_location(), "content_index": 0, "part": part}


_KINDS = {"message": "content", "reasoning": "reasoning"}
_CALLS = {"function_call": ("call", "arguments"), "custom_tool_call": ("custom", "input")}
#: Events for a call's growth, and the field that grows.
_GROWTH = {f"response.{kind}_{grows}.delta": grows for kind, grows in GROWS.items()}


class ResumeMismatch(QuireError):
    """The new worker's output differs from what the previous one delivered."""

    status = 503
    code = "stream_lost"


def items_from_events(events: Iterable[Event]) -> list[dict[str, Any]]:
    """The output items, as far as their events describe them.

    A worker that takes a response over generates it from the beginning, with the same seed and thus
    the same tokens, and skips what was sent before.
    """
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


class DeliveredItemFilter:
    """Removes from a new answer's parts what its items already contain."""

    def __init__(self, items: Iterable[dict[str, Any]]) -> None:
        self._delivered: deque[tuple[str, str]] = deque()
        for item in items:
            if item["type"] in GROWS:
                begins, grows = _CALLS[item["type"]]
                name = name_for_model(item.get("namespace"), item["name"])
                self._delivered += [(begins, name), (grows, item[GROWS[item["type"]]])]
            else:
                text = "".join(part["text"] for part in item["content"])
                self._delivered.append((_KINDS[item["type"]], text))

    def skip_delivered(self, parts: Iterable[Part]) -> list[Part]:
        """Parts that weren't delivered yet. Raises `ResumeMismatch` if they contradict others."""
        return [rest for part in parts if (rest := self._rest(part)) is not None]

    def _rest(self, part: Part) -> Part | None:
        while self._delivered:
            kind, text = self._delivered[0]
            if not text:
                self._delivered.popleft()
                continue
            length = min(len(text), len(part.text))
            if kind != part.kind or text[:length] != part.text[:length]:
                raise ResumeMismatch("Another worker could not continue the answer.")
            if kind in START_KINDS:
                self._delivered.popleft()
                return None
            self._delivered[0] = (kind, text[length:])
            if length == len(part.text):
                return None
            part = replace(part, text=part.text[length:])
        return part
