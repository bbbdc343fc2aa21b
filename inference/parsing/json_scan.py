"""JSON read while it grows: where a value ends, and a call's name and arguments."""

from __future__ import annotations

import json
import re

_STRUCTURE = re.compile(r'["{}\[\]]')
_STRUCTURE_OR_MARK = re.compile(r'["{}\[\]<]')
_IN_STRING = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[,}\]\s]")
#: More brackets inside each other are no arguments.
MAX_DEPTH = 256


class ValueScanner:
    """Finds the end of one JSON value. It counts brackets outside of strings and judges no more.

    With `to_mark` a value that isn't closed ends before a "<" outside of strings, where JSON has
    none: a mark of the model's begins there.
    """

    def __init__(self) -> None:
        self.to_mark = False
        self.kind = ""
        self.too_deep = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> int | None:
        """The place after the value's end in this piece; None while it goes on.

        A number, `true`, `false` or `null` ends before the character that can't belong to it.
        """
        place = 0
        if not self.kind and text:
            self.kind = {"{": "{", "[": "[", '"': '"'}.get(text[0], "scalar")
        if self.kind == "scalar":
            end = _SCALAR_END.search(text)
            return None if end is None else end.start()
        while place < len(text):
            if self._in_string:
                place = self._through_string(text, place)
                if not self._in_string and self._depth == 0:
                    return place
                continue
            found = (_STRUCTURE_OR_MARK if self.to_mark else _STRUCTURE).search(text, place)
            if found is None:
                return None
            if found[0] == "<":
                return found.start()
            place = found.end()
            if self._bracket(found[0]):
                return place
        return None

    def _bracket(self, char: str) -> bool:
        """Count it; whether the value has ended with it."""
        if char == '"':
            self._in_string = True
            return False
        self._depth += 1 if char in "{[" else -1
        self.too_deep = self.too_deep or self._depth > MAX_DEPTH
        return self._depth <= 0

    def _through_string(self, text: str, place: int) -> int:
        if self._escaped:
            self._escaped = False
            return place + 1
        found = _IN_STRING.search(text, place)
        if found is None:
            return len(text)
        if found[0] == "\\":
            self._escaped = True
        else:
            self._in_string = False
        return found.end()


def decoded(text: str) -> object:
    """The value of a JSON text; the text itself when it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
