"""`ToolCallFormat`: how an enforced call is written, and the grammar for it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from engine.contract.errors import InvalidRequest
from engine.contract.json_schema import InexactNumber, enforced_schema
from inference.parsers.parameter_schemas import ParameterSchema
from inference.parsers.state_machine import find_first

# -- A Lark grammar of a text, as the grammar of that text inside a JSON string.
#
# Models write a custom tool's input into the JSON of a call. There a quote, a backslash and a
# control
# character stand as escapes, so wherever the grammar allows one of these, the new grammar allows
# its escape: the literal `"a\n"` becomes `"a\\n"`, the class `[^x]` every character that needs no
# escape or one of the escapes.


#: Characters with an escape of their own, and how JSON writes them.
_ESCAPES = {'"': r"\"", "\\": r"\\", "\n": r"\n", "\r": r"\r", "\t": r"\t", "\b": r"\b"} | {
    "\f": r"\f"
}
#: What may stand in a JSON string as it is, for an intersection of classes.
_UNESCAPED_CHARS = r'[^"\\\x00-\x1f]'
#: Pieces of Lark source that may hold characters of the text, and comments, which may look so.
_TOKEN = re.compile(
    r"""//[^\n]*|\#[^\n]*
    |(?P<range>"(?:\\.|[^"\\\n])+"\s*\.\.\s*"(?:\\.|[^"\\\n])+")
    |(?P<string>"(?:\\.|[^"\\\n])*")(?P<fold>i(?![a-zA-Z_]))?
    |(?P<regex>/(?![/*])(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n])+/)(?P<flags>[a-z]*)
    |%import\s+common\s*\.\s*(?P<common>\w+)(?:\s*->\s*(?P<alias>\w+))?
    |%ignore\b
    |(?P<other>%\w*|<[|\[][^>\n]*>)""",
    re.VERBOSE,
)
#: Lark's common terminals that may hold such a character.
_COMMON = {
    "ESCAPED_STRING": r'/"([^"\\\n]|\\.)*"/',
    "WS": r"/[ \t\f\r\n]+/",
    "WS_INLINE": r"/[ \t]+/",
    "CR": r"/\r/",
    "LF": r"/\n/",
    "NEWLINE": r"/(\r?\n)+/",
    "SH_COMMENT": r"/#[^\n]*/",
    "CPP_COMMENT": r"/\/\/[^\n]*/",
    "SQL_COMMENT": r"/--[^\n]*/",
}
#: Those that can't, and are the same in a string.
UNCHANGED_RULES = re.compile(
    "DIGIT|HEXDIGIT|INT|SIGNED_INT|DECIMAL|FLOAT|SIGNED_FLOAT|NUMBER|SIGNED_NUMBER|LCASE_LETTER|"
    "UCASE_LETTER|LETTER|WORD|CNAME"
)


def escape_lark_for_json(grammar: str) -> str:
    """The grammar of the JSON strings' insides. Raises `InvalidRequest` for what can't be told."""
    parts, position = [], 0
    for match in _TOKEN.finditer(grammar):
        parts += [grammar[position : match.start()], _escaped_token(match)]
        position = match.end()
    return "".join([*parts, grammar[position:]])


def regex_to_lark(pattern: str) -> str:
    """A regular expression as a Lark grammar."""
    return f"start: {_lark_regex(pattern)}"


def _lark_regex(pattern: str) -> str:
    inside = re.sub(r"\\(.)|/", lambda match: match[0] if match[1] else r"\/", pattern, flags=re.S)
    return f"/{inside.replace(chr(10), '[' + chr(92) + 'n]')}/"


def _escaped_token(match: re.Match[str]) -> str:
    if match["range"]:
        return _range(match["range"])
    if match["string"]:
        return _string(match["string"], match["fold"] or "")
    if match["regex"]:
        return f"/{_Regex(match['regex'][1:-1], match['flags']).to_escaped()}/{match['flags']}"
    if match["common"]:
        return _imported(match["common"], match["alias"])
    if match["other"]:
        raise _unsupported_grammar(match["other"])
    return match[0]


def _unsupported_grammar(what: str) -> InvalidRequest:
    return InvalidRequest(f"A custom tool's grammar can't hold {what[:50]!r} here.", param="tools")


def _string(source: str, fold: str) -> str:
    try:
        text = json.loads(source)
    except ValueError:
        raise _unsupported_grammar(source) from None
    inside = json.dumps(text, ensure_ascii=False)[1:-1]
    if fold and inside != text:
        raise _unsupported_grammar(source + fold)
    return json.dumps(inside, ensure_ascii=False) + fold


def _range(source: str) -> str:
    ends = [json.loads(end) for end in re.findall(r'"(?:\\.|[^"\\\n])+"', source)]
    if any(len(end) != 1 for end in ends):
        raise _unsupported_grammar(source)
    first, last = (f"\\x{{{ord(end):x}}}" for end in ends)
    return f"/{_class(f'[{first}-{last}]', ends)}/"


def _imported(name: str, alias: str | None) -> str:
    if UNCHANGED_RULES.fullmatch(name):
        return f"%import common.{name}" + (f" -> {alias}" if alias else "")
    if name not in _COMMON:
        raise _unsupported_grammar(f"common.{name}")
    return f"{alias or name}: {escape_lark_for_json(_COMMON[name])}"


def _class(source: str, ends: list[str] | None = None) -> str:
    """One character of a class, escaped where it needs that. `ends`: of a range, instead of it."""

    def holds(char: str) -> bool:
        if ends is not None:
            return ends[0] <= char <= ends[1]
        try:
            return re.fullmatch(source, char, re.ASCII) is not None
        except re.error:
            raise _unsupported_grammar(source) from None

    escapes = [escape for char, escape in _ESCAPES.items() if holds(char)]
    if not escapes:
        return source
    alternatives = "|".join(re.escape(escape) for escape in escapes)
    return f"(?:[{source}&&{_UNESCAPED_CHARS}]|(?-i:{alternatives}))"


class _Regex:
    """Rewrites one regular expression, a piece at a time."""

    def __init__(self, source: str, flags: str) -> None:
        self._source, self._position = source, 0
        if set(flags) - {"s", "i"}:
            raise _unsupported_grammar(f"/{source}/{flags}")
        self._dot = r"[\x{0}-\x{10ffff}]" if "s" in flags else r"[^\n]"

    def to_escaped(self) -> str:
        """The whole of it."""
        escaped = ""
        while self._position < len(self._source):
            escaped += self._escape_char(self._source[self._position])
        return escaped

    def _match(self, pattern: str) -> str:
        match = re.compile(pattern, re.DOTALL).match(self._source, self._position)
        if match is None:
            raise _unsupported_grammar(self._source[self._position :])
        self._position = match.end()
        return match[0]

    def _escape_char(self, char: str) -> str:
        if char == "\\":
            return self._escape()
        if char == "[":
            return _class(self._match(r"\[\^?\]?(?:\\.|[^\[\]\\])*\]"))
        if char == "(":
            return self._match(r"\((?!\?)|\(\?:|\(\?P?<[A-Za-z_]\w*>")
        if char == "{":
            return self._match(r"\{\d*,?\d*\}")
        self._position += 1
        if char == ".":
            return self._any()
        if char in _ESCAPES:
            return re.escape(_ESCAPES[char])
        return char

    def _any(self) -> str:
        line = _ESCAPES if "x{0}" in self._dot else {c: e for c, e in _ESCAPES.items() if c != "\n"}
        return f"(?:{_UNESCAPED_CHARS}|(?-i:{'|'.join(map(re.escape, line.values()))}))"

    def _escape(self) -> str:
        text = self._match(r"\\(?:x[0-9a-fA-F]{2}|x\{[0-9a-fA-F]+\}|u[0-9a-fA-F]{4}|.)")
        kind = text[1]
        if kind in "dDwWsS":
            return _class(f"[{text}]")
        char = {"n": "\n", "r": "\r", "t": "\t", "f": "\f"}.get(kind)
        if kind in "xu":
            code = int(text[2:].strip("{}"), 16)
            if code > 0x10FFFF:
                raise _unsupported_grammar(text)
            char = chr(code)
        elif char is None and kind.isalnum():
            raise _unsupported_grammar(text)
        char = char if char is not None else kind
        if char in _ESCAPES:
            return re.escape(_ESCAPES[char])
        return text


# -- `ToolFunction`: what a model may call.


@dataclass(frozen=True)
class ToolFunction:
    """A function that the model may call. `parameters`: its JSON schema, {} for none.

    `strict`: calls must follow the schema even where the model chooses freely. `grammar`: Lark, of
    the one parameter that a custom tool has; "" for any text.
    """

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    strict: bool = False
    grammar: str = ""

    @cached_property
    def schema(self) -> ParameterSchema:
        """What `parameters` says."""
        return ParameterSchema(self.parameters)


#: Calls in one answer that a grammar allows: a weak model would go on for ever.
MAX_PARALLEL_CALLS = 16
#: Models are trained on the JSON that Python writes.
_PYTHON_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NAME = "NAME"
#: Text that begins like no call; or nothing.
_OTHER = r"/([^\s{\[](.|\n)*)?/"


class ArgumentsRule(Protocol):
    """Writes the grammar rules of a function's arguments."""

    def __call__(self, rule: str, function: ToolFunction, special: Mapping[str, int]) -> list[str]:
        """Lark rules, one of which is called `rule`; others begin with that name.

        `special` has the texts of the model's control tokens, with their ids (see `lark_literal`).
        """


def json_arguments(rule: str, function: ToolFunction, special: Mapping[str, int]) -> list[str]:
    """A JSON object that follows the function's schema."""
    if function.grammar:
        opening, text = quoted('{"input": '), f"{rule}_text"
        return [f'{rule}: {opening} {text} "}}"', *quoted_input(text, function)]
    return [f"{rule}: %json {json.dumps(closed_schema(function))}"]


def quoted_input(rule: str, function: ToolFunction) -> list[str]:
    """A custom tool's input as a JSON string, quotes included."""
    quote = quoted('"')
    inside = f"%lark {{\n{escape_lark_for_json(function.grammar)}\n}}"
    return [f"{rule}: {quote} {rule}_inside {quote}", f"{rule}_inside: {inside}"]


def raw_input(rule: str, function: ToolFunction) -> list[str]:
    """The same where texts stand as they are, between marks of their own."""
    return [f"{rule}: %lark {{\n{function.grammar}\n}}"]


def no_shared_rules(special: Mapping[str, int]) -> Sequence[str]:
    """For arguments that need no rules in common."""
    return ()


def in_any_number(pairs: Mapping[str, str], required: Sequence[str], separator: str) -> str:
    """Lark for an object's pairs: the required ones in their order, then any of the others.

    `pairs`: the Lark of each by its key.
    """
    comma = f" {quoted(separator)} "
    first = [pair for key, pair in pairs.items() if key in required]
    optional = [pair for key, pair in pairs.items() if key not in required]
    tails = [f"({comma}{pair})?" for pair in optional]
    if first:
        return " ".join([comma.join(first), *tails])
    starts = [" ".join([pair, *tails[index + 1 :]]) for index, pair in enumerate(optional)]
    return " | ".join([*starts, quoted("")])


def checked_key(key: str, pattern: re.Pattern[str]) -> str:
    """A parameter's name that this way of writing calls can hold. Raises `InvalidRequest`."""
    if not pattern.fullmatch(key):
        raise InvalidRequest(
            f"This model's tool calls can't have a parameter named {key[:50]!r}.", param="tools"
        )
    return key


def closed_schema(function: ToolFunction) -> dict[str, object]:
    """The schema of a function's arguments. With `strict` each of its keywords counts."""
    return {**_enforced({"type": "object", **function.parameters}), **_json_options(function)}


def json_value(rule: str, schema: ParameterSchema, function: ToolFunction) -> str:
    """A rule for a value in JSON. With `strict` each keyword of its schema counts."""
    enforced = {**_enforced(schema.standalone()), **_json_options(function)}
    return f"{rule}: %json {json.dumps(enforced)}"


def _enforced(schema: dict[str, Any]) -> dict[str, Any]:
    try:
        return dict(enforced_schema(schema))
    except InexactNumber as error:
        raise InvalidRequest(f"A tool's schema: {error}.", param="tools") from error


def _json_options(function: ToolFunction) -> dict[str, object]:
    return {"x-guidance": {**_PYTHON_SPACES, "lenient": not function.strict}}


@dataclass(frozen=True)
class ToolCallFormat:
    """Texts around calls; NAME stands for the function's name in `call_start`.

    Attributes:
        open, close: before the first call and after the last one.
        call_start, call_end: of each call. separator: between two.
        trigger: what the calls, or each call, begin with; "" where calls are the whole answer.
        arguments: the grammar rules for the arguments. shared: gives, for the control tokens'
            ids, rules that all of them may use.
        answer_prefix: before an answer that comes instead of calls.
        allows_text: whether text and calls can be told apart by a grammar.
    """

    call_start: str
    call_end: str
    open: str = ""
    close: str = ""
    separator: str = "\n"
    trigger: str = ""
    arguments: ArgumentsRule = json_arguments
    shared: Callable[[Mapping[str, int]], Sequence[str]] = no_shared_rules
    answer_prefix: str = ""
    allows_text: bool = True

    def grammar(
        self,
        functions: Sequence[ToolFunction],
        special: dict[str, int],
        *,
        parallel: bool,
        required: bool = True,
        answer: Mapping[str, object] | None = None,
    ) -> str:
        """A Lark grammar of calls of these functions.

        Args:
            special: texts of the model's control tokens, with their ids.
            parallel: up to `MAX_PARALLEL_CALLS`, not one.
            required: nothing but calls; False: text, in which calls follow the schemas.
            answer: instead of calls, a JSON document of this schema may come.
        """
        rules: list[str] = []
        for number, function in enumerate(functions):
            begin = self.call_start.replace(_NAME, function.name)
            if not required and not self._trigger_opens:
                begin = begin.removeprefix(self.trigger)
            rule = f"arguments_{number}"
            rules.append(
                f"call_{number}: {lark_literal(begin, special)} {rule} "
                f"{lark_literal(self.call_end, special)}"
            )
            rules += self.arguments(rule, function, special)
        calls = " | ".join(f"call_{number}" for number in range(len(functions)))
        if required:
            start = [f"start: {self._all_calls(special, parallel)}"]
            if answer is not None:
                prefix = lark_literal(self.answer_prefix, special)
                start = [f"{start[0]} | answer", f"answer: {prefix} %json {json.dumps(answer)}"]
        else:
            start = self._calls_or_text(special, parallel)
        return "\n".join([*start, f"call: {calls}", *rules, *self.shared(special)])

    def _calls_or_text(self, special: dict[str, int], parallel: bool) -> list[str]:
        if self.trigger:
            return self._triggered(special, parallel)
        return [f"start: {self._all_calls(special, parallel)} | {_OTHER}"]

    @property
    def _trigger_opens(self) -> bool:
        """Whether the trigger stands before all calls, not before each."""
        return bool(self.trigger) and self.open.startswith(self.trigger)

    def _all_calls(self, special: dict[str, int], parallel: bool, skip: str = "") -> str:
        separator = lark_literal(self.separator, special)
        more = f"({separator} call){{0,{MAX_PARALLEL_CALLS - 1}}}" if parallel else ""
        opening = lark_literal(self.open.removeprefix(skip), special)
        return f"{opening} call {more} {lark_literal(self.close, special)}"

    def _triggered(self, special: dict[str, int], parallel: bool) -> list[str]:
        """Text, and after each trigger a whole call (or after the only one all of them)."""
        after, count = "call", "*" if parallel else "?"
        if self._trigger_opens:
            after, count = self._all_calls(special, parallel, skip=self.trigger), "?"
        mark = lark_literal(self.trigger, special)
        if self.trigger in special:
            tag = [f"tagged: TEXT {mark} {after}"]
        else:
            tag = [f"tagged: trigger {after}", f"trigger[lazy]: TEXT {mark}"]
        return [f"start: tagged{count} rest", "rest: TEXT", r"TEXT: /(.|\n)*/", *tag]


def quoted(text: str) -> str:
    """A text as a JSON string, which Lark reads as well."""
    return json.dumps(text, ensure_ascii=False)


def lark_text_until(
    closing: str, rule: str, special: Mapping[str, int], pattern: str = r"/(.|\n)*/"
) -> tuple[str, list[str]]:
    """Text up to `closing` and that itself: what to write for it, and the rules behind it.

    `pattern`: what the text is, a terminal's definition in Lark.
    """
    text = f"{rule.upper()}_CHARS"
    rules = [f"{text}: {pattern}"]
    position = find_first(closing, list(special))[0]
    if position < 0:
        return rule, [f"{rule}[lazy]: {text} {quoted(closing)}", *rules]
    # A control token is none of the text's characters; white space before it counts as text.
    return rule, [f"{rule}: {text} {lark_literal(closing[position:], special)}", *rules]


#: Regular expressions that Lark's have no counterpart for: look-around, references, anchors inside.
_UNSUPPORTED_REGEX = re.compile(r"\(\?(?!:)|\\[bBAzZkG1-9]|(?<![\\\[])\^|(?<!\\)\$")


def text_pattern(schema: ParameterSchema, function: ToolFunction) -> str:
    """A terminal in Lark for the strings that a schema allows.

    Raises:
        InvalidRequest: the function is strict and the schema's pattern can't be enforced in text.
    """
    low, high = schema.keyword("minLength"), schema.keyword("maxLength")
    low = low if isinstance(low, int) and low > 0 else 0
    high = high if isinstance(high, int) and high >= low else ""
    terminals = [f"/(?s:.{{{low},{high}}})/"] if low or high != "" else []
    pattern = schema.keyword("pattern")
    if isinstance(pattern, str):
        inside = pattern.removeprefix("^")
        anchored_end = re.search(r"(?<!\\)(\\\\)*\$$", inside) is not None
        inside = inside[:-1] if anchored_end else inside
        if _UNSUPPORTED_REGEX.search(inside) is None:
            prefix = "" if pattern.startswith("^") else "(?s:.*)"
            after = "" if anchored_end else "(?s:.*)"
            terminals.append(_lark_regex(f"{prefix}(?:{inside}){after}"))
        elif function.strict:
            raise InvalidRequest(
                f"This model writes strings as text, where the pattern {pattern[:50]!r} can't be "
                "enforced. Leave it out, or use a function without strict.",
                param="tools",
            )
    return " & ".join(terminals) or r"/(.|\n)*/"


def lark_literal(text: str, special: Mapping[str, int]) -> str:
    """A text in Lark, with control tokens by their ids: `"Hm " <[17]> "x"`."""
    parts = []
    while text:
        position, token = find_first(text, list(special))
        head = text if position < 0 else text[:position]
        if head:
            parts.append(quoted(head))
        if position >= 0:
            parts.append(f"<[{special[token]}]>")
        text = "" if position < 0 else text[position + len(token) :]
    return " ".join(parts)
