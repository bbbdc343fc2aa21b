"""`CallObject`: incremental parser of `{"name": ..., "arguments": {...}}`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

# -- Incremental JSON scanning: where a value ends, and a call's name and arguments.


_STRUCTURE = re.compile(r'["{}\[\]]')
_STRUCTURE_OR_MARK = re.compile(r'["{}\[\]<]')
_IN_STRING = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[,}\]\s]")
#: Maximum nesting of arguments; deeper JSON is not taken for a call.
MAX_DEPTH = 256


class ValueScanner:
    """Finds the end of one JSON value by counting brackets outside strings; validates nothing.

    With `to_mark` an unclosed value ends before a "<" outside strings. JSON has none there, so it
    begins one of the model's marks.
    """

    def __init__(self) -> None:
        self.to_mark = False
        self.kind = ""
        self.too_deep = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> int | None:
        """Return the index after the value's end in this chunk; None until it ends.

        A number, `true`, `false` or `null` ends before the first character that can't continue it.
        """
        position = 0
        if not self.kind and text:
            self.kind = {"{": "{", "[": "[", '"': '"'}.get(text[0], "scalar")
        if self.kind == "scalar":
            end = _SCALAR_END.search(text)
            return None if end is None else end.start()
        while position < len(text):
            if self._in_string:
                position = self._through_string(text, position)
                if not self._in_string and self._depth == 0:
                    return position
                continue
            match = (_STRUCTURE_OR_MARK if self.to_mark else _STRUCTURE).search(text, position)
            if match is None:
                return None
            if match[0] == "<":
                return match.start()
            position = match.end()
            if self._bracket(match[0]):
                return position
        return None

    def _bracket(self, char: str) -> bool:
        """Count a bracket or quotation mark; return whether it ends the value."""
        if char == '"':
            self._in_string = True
            return False
        self._depth += 1 if char in "{[" else -1
        self.too_deep = self.too_deep or self._depth > MAX_DEPTH
        return self._depth <= 0

    def _through_string(self, text: str, position: int) -> int:
        if self._escaped:
            self._escaped = False
            return position + 1
        match = _IN_STRING.search(text, position)
        if match is None:
            return len(text)
        if match[0] == "\\":
            self._escaped = True
        else:
            self._in_string = False
        return match.end()


def decoded(text: str) -> object:
    """Return the value of a JSON text; invalid JSON is returned unchanged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


ARGUMENTS = ("arguments", "parameters")
#: Keys that a call may begin with. Any other first key means that the object is no call.
LEADING_KEYS = frozenset({"name", "type", "id", *ARGUMENTS})


class CallObject:
    """Parses one JSON object incrementally and emits the call in it.

    An object is known to be a call once it has a name and its arguments have begun. If it ends or
    is invalid before that, `failed` is set, and `raw` has all that was read, to return as content.

    Args:
        on_call: called with the name. on_arguments: called with further JSON of the arguments.
        is_function: whether an object with this name is a call.
    """

    def __init__(
        self,
        on_call: Callable[[str], None],
        on_arguments: Callable[[str], None],
        is_function: Callable[[str], bool],
    ) -> None:
        self._on_call, self._on_arguments = on_call, on_arguments
        self._is_function = is_function
        self.raw = ""
        self.certain = False
        self.done = False
        self.failed = False
        self._state: Callable[[str], int] = self._open
        self._scanner = ValueScanner()
        self._key = self._value = ""
        self._name: str | None = None
        self._early: str | None = None
        self._streams = False

    def feed(self, text: str) -> int:
        """Return how many characters belong to the object: all until it is `done` or `failed`."""
        position = 0
        while position < len(text) and not (self.done or self.failed):
            used = self._state(text[position:])
            if not self.certain:
                self.raw += text[position : position + used]
            position += used
        return position

    def _expect(self, text: str, then: dict[str, Callable[[], None]]) -> int:
        """Skip white space; the next character must be in `then`."""
        rest = text.lstrip()
        if not rest:
            return len(text)
        action = then.get(rest[0])
        if action is None:
            self.failed = True
            return len(text) - len(rest)
        action()
        return len(text) - len(rest) + 1

    def _open(self, text: str) -> int:
        return self._expect(text, {"{": lambda: self._go(self._on_key_start)})

    def _go(self, state: Callable[[str], int]) -> None:
        self._state = state
        self._scanner, self._value, self._streams = ValueScanner(), "", False

    def _on_key_start(self, text: str) -> int:
        rest = text.lstrip()
        if rest.startswith('"'):
            self._go(self._in_key)
            return len(text) - len(rest)
        return self._expect(text, {"}": self._finish})

    def _in_key(self, text: str) -> int:
        end = self._collect(text)
        if end is None:
            return len(text)
        self._key = str(decoded(self._value))
        if self._key not in LEADING_KEYS and not self.certain:
            self.failed = True
            return end
        self._go(self._on_value_start)
        return end

    def _on_value_start(self, text: str) -> int:
        return self._expect(text, {":": lambda: self._go(self._value_start)})

    def _value_start(self, text: str) -> int:
        rest = text.lstrip()
        if not rest:
            return len(text)
        self._go(self._in_value)
        opens = self._key in ARGUMENTS and rest[0] == "{"
        if opens and self._name is not None and not self.certain:
            self._streams = True
            self._commit(self._name, "")
        return len(text) - len(rest)

    def _in_value(self, text: str) -> int:
        end = self._collect(text)
        if self._scanner.too_deep:
            self.failed = True
            return end if end is not None else len(text)
        if end is None:
            return len(text)
        if not self._streams:
            self._add_value()
        self._go(self._after_value)
        return end

    def _collect(self, text: str) -> int | None:
        end = self._scanner.feed(text)
        chunk = text if end is None else text[:end]
        if self._streams:
            self._on_arguments(chunk)
        else:
            self._value += chunk
        return end

    def _add_value(self) -> None:
        """Process a complete value."""
        if self.certain:
            return
        value = decoded(self._value)
        if self._key == "name":
            self._name = value if isinstance(value, str) else None
            self.failed = not self._name or not self._is_function(self._name)
        elif self._key in ARGUMENTS:
            self._early = _as_arguments(self._value, value)
        if self._name is not None and self._early is not None and not self.failed:
            self._commit(self._name, self._early)

    def _after_value(self, text: str) -> int:
        return self._expect(text, {",": lambda: self._go(self._on_key_start), "}": self._finish})

    def _commit(self, name: str, arguments: str) -> None:
        self.certain = True
        self._on_call(name)
        if arguments:
            self._on_arguments(arguments)

    def _finish(self) -> None:
        if self._name is None:
            self.failed = True
            return
        if not self.certain:
            self._commit(self._name, "{}")  # calls of functions without parameters may omit them
        self.done = True


def _as_arguments(text: str, value: object) -> str:
    """Return arguments as JSON text; OpenAI's format has them as text already."""
    if isinstance(value, str):
        return value or "{}"
    return "{}" if value is None else text
