"""The Responses API's items as the messages of a chat, and input items as they are kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from engine.contract.errors import InvalidRequest
from inference.errors import UnsupportedField
from inference.responses.namespaces import name_for_model
from storage.ids import new_id

#: Parts of a message's content that are text.
TEXT_PARTS = frozenset({"input_text", "output_text", "reasoning_text", "text"})
PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
}
CALLS = ("function_call", "custom_tool_call")
#: What a call came to.
OUTPUTS = ("function_call_output", "custom_tool_call_output")


class Messages:
    """Collects items into chat messages. Raises `InvalidRequest` naming `input[n]`."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._reasoning = ""

    def instruct(self, text: str) -> None:
        """A system message; before all others."""
        self.messages.insert(0, {"role": "system", "content": text})

    def add_all(self, items: Iterable[dict[str, Any]]) -> None:
        """Add items in order."""
        for place, item in enumerate(items):
            self._add(item, f"input[{place}]")

    def _add(self, item: dict[str, Any], param: str) -> None:
        kind = item.get("type", "message")
        if kind == "message":
            self._add_message(item, param)
        elif kind in CALLS:
            self._add_call(item, param)
        elif kind in OUTPUTS:
            output = _text(item.get("output"), f"{param}.output")
            call_id = _needed(item, "call_id", param)
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        elif kind == "reasoning":
            self._reasoning += _text(item.get("content") or "", f"{param}.content")
        else:
            raise UnsupportedField(
                f"Input items of the type {str(kind)[:50]!r} are not supported.",
                param=f"{param}.type",
            )

    def _add_message(self, item: dict[str, Any], param: str) -> None:
        role = item.get("role")
        if role is None:
            raise InvalidRequest("A message needs a role.", param=f"{param}.role")
        text = _text(item.get("content"), f"{param}.content")
        if role == "assistant":
            self._assistant()["content"] = text
        else:
            self._reasoning = ""
            self.messages.append({"role": role, "content": text})

    def _add_call(self, item: dict[str, Any], param: str) -> None:
        last = self.messages[-1] if self.messages else {}
        # Text and calls of one turn are one message, as the model wrote them.
        message = last if last.get("role") == "assistant" else self._assistant()
        kind, text = "function", "arguments"
        if item["type"] == "custom_tool_call":
            kind, text = "custom", "input"
        call = {"id": _needed(item, "call_id", param), "type": kind}
        called = {name: _needed(item, name, param) for name in ("name", text)}
        called["name"] = name_for_model(item.get("namespace"), called["name"])
        message.setdefault("tool_calls", []).append({**call, kind: called})

    def _assistant(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        if self._reasoning:
            message["reasoning_content"], self._reasoning = self._reasoning, ""
        self.messages.append(message)
        return message


def _needed(item: dict[str, Any], name: str, param: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{param} needs {name}.", param=f"{param}.{name}")
    return value


def _text(content: Any, param: str) -> str:
    """A string, or text parts as one. Raises `UnsupportedField` for images and files."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest("There is no content.", param=param)
    texts = []
    for place, part in enumerate(content):
        kind, text = part.get("type"), part.get("text")
        if kind == "refusal":
            text = part.get("refusal")
        elif not isinstance(kind, str) or kind not in TEXT_PARTS:
            raise UnsupportedField(
                f"Content of the type {str(kind)[:50]!r} is not supported.",
                param=f"{param}[{place}].type",
            )
        if not isinstance(text, str):
            raise InvalidRequest("A text part needs a text.", param=f"{param}[{place}].text")
        texts.append(text)
    return "".join(texts)


def kept_items(items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Input items as they are listed later: each with an id, content always in parts."""
    kept = []
    for item in items:
        kind = item.get("type", "message")
        made = {"id": new_id(PREFIXES.get(kind, "item_")), "status": "completed", **item}
        made["type"] = kind
        if kind == "message" and isinstance(item.get("content"), str):
            part = "output_text" if item.get("role") == "assistant" else "input_text"
            made["content"] = [{"type": part, "text": item["content"]}]
            if part == "output_text":
                made["content"][0]["annotations"] = []
        kept.append(made)
    return kept
