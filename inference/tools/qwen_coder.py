"""Qwen 3 Coder's way: tags for the function and for each of its parameters."""

from __future__ import annotations

import ast
import json
import re
from typing import Any, ClassVar

from inference.parsing.literals import first_of, may_begin
from inference.tools.base import ToolFunction, ToolParser
from inference.tools.layout import Layout, checked_key

OPEN, CLOSE = "<tool_call>", "</tool_call>"
END_VALUE, END_FUNCTION = "</parameter>", "</function>"
_FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]{1,128})>")
_KEY = re.compile(r"[^>\n]{1,128}")
_PARAMETER = re.compile(r"\s*(?:<parameter=(?P<key>[^>\n]{1,128})>|</function>|(?=</tool_call>))")


def _parameters(rule: str, function: ToolFunction) -> list[str]:
    """Each parameter in its order; those that aren't required may be missing."""
    schema = function.parameters
    required = schema.get("required") or []
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    parts, rules = [], []
    for number, (key, value) in enumerate((schema.get("properties") or {}).items()):
        name = f"{rule}_{number}"
        parts.append(name if key in required else f"{name}?")
        opening = _quoted(f"<parameter={checked_key(key, _KEY)}>\n")
        closing = _quoted(f"\n{END_VALUE}\n")
        if _is_string(value) and "enum" not in value:
            rules.append(f"{name}: {opening} {name}_text")
            rules.append(rf"{name}_text[lazy]: /(.|\n)*/ {closing}")
        elif _is_string(value):
            choices = " | ".join(_quoted(str(choice)) for choice in value["enum"])
            rules.append(f"{name}: {opening} ({choices}) {closing}")
        else:
            nested = {**value, **shared} if isinstance(value, dict) else {}
            nested["x-guidance"] = {"whitespace_flexible": False, "lenient": not function.strict}
            rules.append(f"{name}: {opening} {name}_json {closing}")
            rules.append(f"{name}_json: %json {json.dumps(nested)}")
    return [f"{rule}: {' '.join(parts)}", *rules]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_string(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "string"


class QwenCoderParser(ToolParser):
    """Strings stream; other values come when they are whole, read by the function's schema."""

    name = "qwen3_coder"
    template_marks: ClassVar[tuple[str, ...]] = ("<function=", "<parameter=")
    markers = (OPEN, CLOSE)
    layout = Layout(
        begin=f"{OPEN}\n<function=NAME>\n",
        end=f"{END_FUNCTION}\n{CLOSE}",
        trigger=OPEN,
        arguments=_parameters,
    )

    _function: dict[str, Any]
    _opening = ""
    _key = ""
    _num_values = 0
    _streams = False

    def _text(self) -> bool:
        self._opening = self._find(OPEN, "<function=")
        if not self._opening:
            return False
        if self._opening != OPEN:
            self._held, self._opening = self._opening + self._held, ""
        self._state = self._function_tag
        return True

    def _function_tag(self) -> bool:
        header = self._header(_FUNCTION)
        if header is None:
            return False
        if header is False:
            if not self._opening:  # the tag alone: don't look at it again
                self._opening, self._held = self._held[:1], self._held[1:]
            return self._fail(self._opening)
        name = header["name"].strip()
        known = self.functions.get(name)
        self._function = (known.parameters.get("properties") or {}) if known else {}
        self._call(name)
        self._num_values = 0
        self._state = self._parameter_tag
        return True

    def _parameter_tag(self) -> bool:
        header = self._header(_PARAMETER)
        if header is None:
            return False
        if header is False or header["key"] is None:
            if header or not self._ended:
                self._arguments("}" if self._num_values else "{}")
            self._state = self._close
            return True
        self._key = header["key"]
        self._arguments(f"{', ' if self._num_values else '{'}{json.dumps(self._key)}: ")
        self._num_values += 1
        self._streams = _is_string(self._function.get(self._key))
        if self._streams:
            self._arguments('"')
        self._state = self._value_start
        return True

    def _value_start(self) -> bool:
        """A line break after the tag belongs to it."""
        if not self._held and not self._ended:
            return False
        self._held = self._held.removeprefix("\n")
        self._state = self._value
        return True

    def _value(self) -> bool:
        place, mark = first_of(self._held, (END_VALUE, END_FUNCTION))
        if not mark and not self._ended:
            return self._part_of_value()
        value = self._held[:place] if mark else self._held
        self._held = self._held[len(value) :].removeprefix(END_VALUE)
        value = value.removesuffix("\n")
        if self._streams:
            self._arguments(json.dumps(value, ensure_ascii=False)[1:-1] + ('"' if mark else ""))
        elif mark:
            self._arguments(_as_json(value))
        self._state = self._parameter_tag if mark else self._text
        return True

    def _part_of_value(self) -> bool:
        if self._streams:
            keep = may_begin(self._held, (f"\n{END_VALUE}", f"\n{END_FUNCTION}"))
            keep = max(keep, may_begin(self._held, (END_VALUE, END_FUNCTION)))
            part = self._held[: len(self._held) - keep]
            self._held = self._held[len(part) :]
            self._arguments(json.dumps(part, ensure_ascii=False)[1:-1])
        return False

    def _close(self) -> bool:
        if self._skip(CLOSE) is None:
            return False
        self._state = self._text
        return True


def _as_json(text: str) -> str:
    """A value that is no string by its schema, as JSON."""
    for read in (json.loads, ast.literal_eval):
        try:
            return json.dumps(read(text.strip()), ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    return json.dumps(text, ensure_ascii=False)
