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

# -- Converts the Lark grammar of a text into a grammar of that text inside a JSON string.
#
# Models write a custom tool's input into the JSON of a call, where quotes, backslashes and control
# characters must be escaped. So wherever the grammar allows one of these, the new grammar allows
# its escape: the literal `"a\n"` becomes `"a\\n"`; the class `[^x]` becomes every character that
# needs no escape, or one of the escapes.


#: Characters that have a short escape in JSON, and that escape.
_ESCAPES = {'"': r"\"", "\\": r"\\", "\n": r"\n", "\r": r"\r", "\t": r"\t", "\b": r"\b"} | {
    "\f": r"\f"
}
#: Characters that JSON strings contain unescaped, to intersect with classes.
_UNESCAPED_CHARS = r'[^"\\\x00-\x1f]'
#: Tokens of Lark source that may contain characters of the text, and comments, to skip them.
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
#: Lark's common terminals that may match a character that needs an escape.
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
#: Lark's common terminals that can't, and so need no change.
UNCHANGED_RULES = re.compile(
    "DIGIT|HEXDIGIT|INT|SIGNED_INT|DECIMAL|FLOAT|SIGNED_FLOAT|NUMBER|SIGNED_NUMBER|LCASE_LETTER|"
    "UCASE_LETTER|LETTER|WORD|CNAME"
)


def escape_lark_for_json(grammar: str) -> str:
    """Return the grammar inside a JSON string. Raises `InvalidRequest` for unsupported grammars."""
    parts, position = [], 0
    for match in _TOKEN.finditer(grammar):
        parts += [grammar[position : match.start()], _escaped_token(match)]
        position = match.end()
    return "".join([*parts, grammar[position:]])


def regex_to_lark(pattern: str) -> str:
    """Return a regular expression as a Lark grammar."""
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
    """Return a pattern for a class's characters, escaped. `ends`: first and last one of a range."""

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
    """Rewrites one regular expression token by token."""

    def __init__(self, source: str, flags: str) -> None:
        self._source, self._position = source, 0
        if set(flags) - {"s", "i"}:
            raise _unsupported_grammar(f"/{source}/{flags}")
        self._dot = r"[\x{0}-\x{10ffff}]" if "s" in flags else r"[^\n]"

    def to_escaped(self) -> str:
        """Rewrite the full expression."""
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


# -- `ToolFunction`: a function that the model may call.


@dataclass(frozen=True)
class ToolFunction:
    """A function that the model may call. `parameters`: its JSON schema, {} for none.

    `strict`: calls must follow the schema even if the model may choose not to call. `grammar`: Lark
    grammar of a custom tool's input; "" for any text.
    """

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    strict: bool = False
    grammar: str = ""

    @cached_property
    def schema(self) -> ParameterSchema:
        """The parsed `parameters`."""
        return ParameterSchema(self.parameters)


#: Maximum number of calls in one output that a grammar allows: a weak model might never stop.
MAX_PARALLEL_CALLS = 16
#: Separators as in Python's JSON, which models are trained on.
_PYTHON_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NAME = "NAME"
#: Text that doesn't begin like a call, or nothing.
_OTHER = r"/([^\s{\[](.|\n)*)?/"


class ArgumentsRule(Protocol):
    """Writes the grammar rules of a function's arguments."""

    def __call__(self, rule: str, function: ToolFunction, special: Mapping[str, int]) -> list[str]:
        """Return Lark rules, one of which is named `rule`; the names of others begin with that.

        `special`: ids of the model's control tokens by their text (see `lark_literal`).
        """


def json_arguments(rule: str, function: ToolFunction, special: Mapping[str, int]) -> list[str]:
    """Return the rule of a JSON object that follows the function's schema."""
    if function.grammar:
        opening, text = quoted('{"input": '), f"{rule}_text"
        return [f'{rule}: {opening} {text} "}}"', *quoted_input(text, function)]
    return [f"{rule}: %json {json.dumps(closed_schema(function))}"]


def quoted_input(rule: str, function: ToolFunction) -> list[str]:
    """Return the rules of a custom tool's input as a JSON string, quotes included."""
    quote = quoted('"')
    inside = f"%lark {{\n{escape_lark_for_json(function.grammar)}\n}}"
    return [f"{rule}: {quote} {rule}_inside {quote}", f"{rule}_inside: {inside}"]


def raw_input(rule: str, function: ToolFunction) -> list[str]:
    """Return the rules of a custom tool's input as unescaped text between marks."""
    return [f"{rule}: %lark {{\n{function.grammar}\n}}"]


def no_shared_rules(special: Mapping[str, int]) -> Sequence[str]:
    """Return no rules, for formats whose arguments share none."""
    return ()


def in_any_number(pairs: Mapping[str, str], required: Sequence[str], separator: str) -> str:
    """Return Lark for an object's pairs: the required ones in order, then any of the others.

    `pairs`: Lark of each pair by its key.
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
    """Check that the format can contain a parameter's name. Raises `InvalidRequest`."""
    if not pattern.fullmatch(key):
        raise InvalidRequest(
            f"This model's tool calls can't have a parameter named {key[:50]!r}.", param="tools"
        )
    return key


def closed_schema(function: ToolFunction) -> dict[str, object]:
    """Return the schema of a function's arguments. With `strict` all its keywords are enforced."""
    return {**_enforced({"type": "object", **function.parameters}), **_json_options(function)}


def json_value(rule: str, schema: ParameterSchema, function: ToolFunction) -> str:
    """Return the rule of a JSON value. With `strict` all keywords of its schema are enforced."""
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
        open, close: texts before the first call and after the last one.
        call_start, call_end: texts around each call. separator: text between two calls.
        trigger: text that the list of calls, or each call, begins with; "" if calls are the whole
            answer.
        arguments: returns the grammar rules of a function's arguments. shared: returns, for the ids
            of control tokens, rules that all functions use.
        answer_prefix: text before an answer without calls.
        allows_text: whether a grammar can distinguish text from calls.
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
        """Return a Lark grammar of calls of these functions.

        Args:
            special: ids of the model's control tokens by their text.
            parallel: allow up to `MAX_PARALLEL_CALLS` calls instead of one.
            required: allow only calls; False: text too, in which calls follow the schemas.
            answer: schema of a JSON document that is allowed instead of calls.
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
        """Whether the trigger precedes the list of calls instead of each call."""
        return bool(self.trigger) and self.open.startswith(self.trigger)

    def _all_calls(self, special: dict[str, int], parallel: bool, skip: str = "") -> str:
        separator = lark_literal(self.separator, special)
        more = f"({separator} call){{0,{MAX_PARALLEL_CALLS - 1}}}" if parallel else ""
        opening = lark_literal(self.open.removeprefix(skip), special)
        return f"{opening} call {more} {lark_literal(self.close, special)}"

    def _triggered(self, special: dict[str, int], parallel: bool) -> list[str]:
        """Return rules for text with a call after each trigger, or all calls after the only one."""
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
    """Return a text as a JSON string, which is valid in Lark too."""
    return json.dumps(text, ensure_ascii=False)


def lark_text_until(
    closing: str, rule: str, special: Mapping[str, int], pattern: str = r"/(.|\n)*/"
) -> tuple[str, list[str]]:
    """Return the symbol for text up to and including `closing`, and the rules that define it.

    `pattern`: definition of the text's terminal in Lark.
    """
    text = f"{rule.upper()}_CHARS"
    rules = [f"{text}: {pattern}"]
    position = find_first(closing, list(special))[0]
    if position < 0:
        return rule, [f"{rule}[lazy]: {text} {quoted(closing)}", *rules]
    # Control tokens can't match as characters of the text; white space before one can.
    return rule, [f"{rule}: {text} {lark_literal(closing[position:], special)}", *rules]


#: Features of regular expressions that Lark lacks: look-around, references, inner anchors.
_UNSUPPORTED_REGEX = re.compile(r"\(\?(?!:)|\\[bBAzZkG1-9]|(?<![\\\[])\^|(?<!\\)\$")


def text_pattern(schema: ParameterSchema, function: ToolFunction) -> str:
    """Return a Lark terminal for the strings that a schema allows.

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
    """Return a text in Lark, with control tokens by their ids: `"Hm " <[17]> "x"`."""
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
