"""Llama 3's way: a JSON object, in the answer's text or after a mark."""

from __future__ import annotations

from typing import ClassVar

from inference.parsing.json_scan import ValueScanner
from inference.tools.base import ToolParser
from inference.tools.layout import Layout


class Llama3JsonParser(ToolParser):
    """`{"name": ..., "parameters": {...}}`, several with `; ` between.

    An object after other text is a call only when it names a function on offer: answers hold JSON
    of their own.
    """

    name = "llama3_json"
    template_marks: ClassVar[tuple[str, ...]] = ("dictionary of argument name and its value",)
    markers = ("<|python_tag|>",)
    layout = Layout(begin='{"name": "NAME", "parameters": ', end="}", separator="; ")

    _opening = ""
    _has_text = False

    def _text(self) -> bool:
        self._opening = self._find("{", *self.markers)
        if self._opening == "{":
            self._held, self._opening = "{" + self._held, ""
            return self._then(self._call_object)
        return bool(self._opening) and self._then(self._call_object)

    def _call_object(self) -> bool:
        return self._in_object(self._opening, self._between)

    def _is_function(self, name: str) -> bool:
        free = bool(self._opening) or not self._has_text or not self.functions
        return free or name in self.functions

    def _emit(self, text: str) -> None:
        self._has_text = self._has_text or bool(text.strip())
        super()._emit(text)

    def _between(self) -> bool:
        self._opening = self._gap = ""
        rest = self._held.lstrip("; \t\r\n")
        if not rest and not self._ended:
            return False
        if rest.startswith("{"):
            self._held = rest
            return self._then(self._call_object)
        return self._then(self._text)

    def _after_failure(self) -> bool:
        """An object that is no call holds none either: all of it is text."""
        self._scanner = ValueScanner()
        if len(self._no_call) > 1 and self._scanner.feed(self._no_call) is None:
            return self._then(self._other_object)
        return self._then(self._text)

    def _other_object(self) -> bool:
        end = self._scanner.feed(self._held)
        size = len(self._held) if end is None else end
        self._emit(self._held[:size])
        self._held = self._held[size:]
        return end is not None and self._then(self._text)
