"""Hermes's way, which Qwen and our demo model share: `<tool_call>` JSON `</tool_call>`."""

from __future__ import annotations

import json

from inference.tools.base import ParsedText, ToolCallText

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """White space right before and right after a call belongs to neither content nor call."""

    def __init__(self) -> None:
        self._held = ""
        self._in_call = False
        self._after_call = False

    def push(self, text: str) -> ParsedText:
        """What is certain after this text."""
        self._held += text
        result = ParsedText()
        while self._step(result):
            pass
        return result

    def _step(self, result: ParsedText) -> bool:
        """Take what can be taken from the held text; whether more may follow."""
        if self._in_call:
            body, found, rest = self._held.partition(CLOSE)
            if not found:
                return False
            self._end_call(body, result)
            self._held, self._in_call = rest, False
            return True
        before, found, rest = self._held.partition(OPEN)
        if found:
            self._emit(before.rstrip(), result)
            self._held, self._in_call = rest, True
            return True
        keep = _maybe_tag(self._held)
        head, self._held = self._held[: len(self._held) - keep], self._held[-keep:] if keep else ""
        shown = head.rstrip()
        # White space at the end may turn out to stand before a call.
        self._held = head[len(shown) :] + self._held
        self._emit(shown, result)
        return False

    def _emit(self, text: str, result: ParsedText) -> None:
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            result.content += text

    def _end_call(self, body: str, result: ParsedText) -> None:
        call = _parse_call(body)
        if call is None:
            self._emit(f"{OPEN}{body}{CLOSE}", result)
        else:
            result.calls.append(call)
            self._after_call = True

    def flush(self) -> ParsedText:
        """The rest: a call that lacks only its closing tag is one, anything else is content."""
        result, held = ParsedText(), self._held
        self._held = ""
        if self._in_call:
            call = _parse_call(held)
            if call is not None:
                result.calls.append(call)
            else:
                result.content = OPEN + held
        elif held.strip() or not self._after_call:
            result.content = held.lstrip() if self._after_call else held
        self._in_call = False
        return result


def _maybe_tag(text: str) -> int:
    """How many characters at the end may begin the opening tag."""
    for size in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if OPEN.startswith(text[-size:]):
            return size
    return 0


def _parse_call(body: str) -> ToolCallText | None:
    """A call from its JSON, or None when it isn't one."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCallText(value["name"], arguments)
