"""A turn's parts as output items, and the events that tell of them while they grow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from inference.parsing import Part
from inference.parsing.parts import BEGINNINGS
from storage.ids import derived_id

Event = dict[str, Any]
#: What of a call grows, by the type of its item.
GROWS = {"function_call": "arguments", "custom_tool_call": "input"}
_CUSTOM = ("ctc_", "custom_tool_call")


class Output:
    """Builds the items of one response; every method returns the events of what it did.

    `request_id`: what the items' ids are made from. `split_names`: see `namespaces.split_names`.

    Attributes:
        items: so far, the last one perhaps unfinished.
    """

    def __init__(
        self, request_id: str, split_names: Mapping[str, tuple[str, str]] | None = None
    ) -> None:
        self._request_id, self._split_names = request_id, split_names or {}
        self.items: list[dict[str, Any]] = []
        self._open = ""
        self._call = -1

    def go_on_from(self, items: list[dict[str, Any]]) -> None:
        """Items that were begun elsewhere, the last one perhaps unfinished."""
        self.items, last = items, items[-1]
        if last["status"] == "in_progress":
            kinds = {"message": "content", "reasoning": "reasoning"}
            self._open = kinds.get(last["type"], "call")

    def take(self, parts: Iterable[Part], logprobs: list[dict[str, Any]]) -> list[Event]:
        """Add parts in the model's order. `logprobs`: of their tokens; they go with the text."""
        events: list[Event] = []
        for part in parts:
            if part.kind in BEGINNINGS:
                events += self._begin_call(part)
            elif part.kind in ("arguments", "input"):
                events += self._more_of_call(part)
            else:
                events += self._more_text(part, logprobs if part.kind == "content" else [])
                logprobs = [] if part.kind == "content" else logprobs
        return events

    def end(self, status: str) -> list[Event]:
        """Close what is open; `status` of the last item: "completed" or "incomplete"."""
        events = [] if self.items else self._begin_text("content")
        return events + self._close(status)

    def _new_id(self, prefix: str) -> str:
        """The same for the same item, whichever gateway writes it."""
        return derived_id(prefix, f"{self._request_id}/{len(self.items)}")

    # -- text ---------------------------------------------------------------------------------

    def _more_text(self, part: Part, logprobs: list[dict[str, Any]]) -> list[Event]:
        events = []
        if self._open != part.kind:
            events = self._close() + self._begin_text(part.kind)
        content = self.items[-1]["content"][0]
        content["text"] += part.text
        delta: Event = {**self._place(), "content_index": 0, "delta": part.text}
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

    # -- calls --------------------------------------------------------------------------------

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
        return [{"type": kind, **self._place(), "delta": part.text}]

    # -- ends ---------------------------------------------------------------------------------

    def _close(self, status: str = "completed") -> list[Event]:
        if not self._open:
            return []
        kind, self._open = self._open, ""
        item = self.items[-1]
        item["status"] = status
        if kind == "call":
            grown = GROWS[item["type"]]
            done = {"type": f"response.{item['type']}_{grown}.done", **self._place()}
            if grown == "arguments":
                done["name"] = item["name"]
            return [{**done, grown: item[grown]}, self._item_event("done")]
        content = item["content"][0]
        name = "output_text" if kind == "content" else "reasoning_text"
        done = {"type": f"response.{name}.done", **self._place(), "content_index": 0}
        done["text"] = content["text"]
        if kind == "content":
            done["logprobs"] = content["logprobs"]
        return [done, self._part_event("done"), self._item_event("done")]

    # -- events -------------------------------------------------------------------------------

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _item_event(self, what: str) -> Event:
        item = self.items[-1]
        copy = {**item, "content": list(item["content"])} if "content" in item else dict(item)
        index = len(self.items) - 1
        return {"type": f"response.output_item.{what}", "output_index": index, "item": copy}

    def _part_event(self, what: str) -> Event:
        part = dict(self.items[-1]["content"][0])
        kind = f"response.content_part.{what}"
        return {"type": kind, **self._place(), "content_index": 0, "part": part}
