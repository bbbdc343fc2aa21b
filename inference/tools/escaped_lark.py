r"""A Lark grammar of a text, as the grammar of that text inside a JSON string.

Models write a custom tool's input into the JSON of a call. There a quote, a backslash and a control
character stand as escapes, so wherever the grammar allows one of these, the new grammar allows its
escape: the literal `"a\n"` becomes `"a\\n"`, the class `[^x]` every character that needs no escape
or one of the escapes.
"""

from __future__ import annotations

import json
import re

from engine.contract.errors import InvalidRequest

#: Characters with an escape of their own, and how JSON writes them.
_ESCAPES = {'"': r"\"", "\\": r"\\", "\n": r"\n", "\r": r"\r", "\t": r"\t", "\b": r"\b"} | {
    "\f": r"\f"
}
#: What may stand in a JSON string as it is, for an intersection of classes.
_PLAIN = r'[^"\\\x00-\x1f]'
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
_SAME = re.compile(
    "DIGIT|HEXDIGIT|INT|SIGNED_INT|DECIMAL|FLOAT|SIGNED_FLOAT|NUMBER|SIGNED_NUMBER|LCASE_LETTER|"
    "UCASE_LETTER|LETTER|WORD|CNAME"
)


def escaped(grammar: str) -> str:
    """The grammar of the JSON strings' insides. Raises `InvalidRequest` for what can't be told."""
    made, place = [], 0
    for found in _TOKEN.finditer(grammar):
        made += [grammar[place : found.start()], _escaped_token(found)]
        place = found.end()
    return "".join([*made, grammar[place:]])


def of_regex(pattern: str) -> str:
    """A regular expression as a Lark grammar."""
    inside = re.sub(r"\\(.)|/", lambda found: found[0] if found[1] else r"\/", pattern, flags=re.S)
    return f"start: /{inside.replace(chr(10), '[' + chr(92) + 'n]')}/"


def _escaped_token(found: re.Match[str]) -> str:
    if found["range"]:
        return _range(found["range"])
    if found["string"]:
        return _string(found["string"], found["fold"] or "")
    if found["regex"]:
        return f"/{_Regex(found['regex'][1:-1], found['flags']).escaped()}/{found['flags']}"
    if found["common"]:
        return _imported(found["common"], found["alias"])
    if found["other"]:
        raise _refused(found["other"])
    return found[0]


def _refused(what: str) -> InvalidRequest:
    return InvalidRequest(f"A custom tool's grammar can't hold {what[:50]!r} here.", param="tools")


def _string(source: str, fold: str) -> str:
    try:
        text = json.loads(source)
    except ValueError:
        raise _refused(source) from None
    inside = json.dumps(text, ensure_ascii=False)[1:-1]
    if fold and inside != text:
        raise _refused(source + fold)
    return json.dumps(inside, ensure_ascii=False) + fold


def _range(source: str) -> str:
    ends = [json.loads(end) for end in re.findall(r'"(?:\\.|[^"\\\n])+"', source)]
    if any(len(end) != 1 for end in ends):
        raise _refused(source)
    first, last = (f"\\x{{{ord(end):x}}}" for end in ends)
    return f"/{_class(f'[{first}-{last}]', ends)}/"


def _imported(name: str, alias: str | None) -> str:
    if _SAME.fullmatch(name):
        return f"%import common.{name}" + (f" -> {alias}" if alias else "")
    if name not in _COMMON:
        raise _refused(f"common.{name}")
    return f"{alias or name}: {escaped(_COMMON[name])}"


def _class(source: str, ends: list[str] | None = None) -> str:
    """One character of a class, escaped where it needs that. `ends`: of a range, instead of it."""

    def holds(char: str) -> bool:
        if ends is not None:
            return ends[0] <= char <= ends[1]
        try:
            return re.fullmatch(source, char, re.ASCII) is not None
        except re.error:
            raise _refused(source) from None

    escapes = [escape for char, escape in _ESCAPES.items() if holds(char)]
    if not escapes:
        return source
    alternatives = "|".join(re.escape(escape) for escape in escapes)
    return f"(?:[{source}&&{_PLAIN}]|(?-i:{alternatives}))"


class _Regex:
    """Rewrites one regular expression, a piece at a time."""

    def __init__(self, source: str, flags: str) -> None:
        self._source, self._place = source, 0
        if set(flags) - {"s", "i"}:
            raise _refused(f"/{source}/{flags}")
        self._dot = r"[\x{0}-\x{10ffff}]" if "s" in flags else r"[^\n]"

    def escaped(self) -> str:
        """The whole of it."""
        made = ""
        while self._place < len(self._source):
            made += self._piece(self._source[self._place])
        return made

    def _take(self, pattern: str) -> str:
        found = re.compile(pattern, re.DOTALL).match(self._source, self._place)
        if found is None:
            raise _refused(self._source[self._place :])
        self._place = found.end()
        return found[0]

    def _piece(self, char: str) -> str:
        if char == "\\":
            return self._escape()
        if char == "[":
            return _class(self._take(r"\[\^?\]?(?:\\.|[^\[\]\\])*\]"))
        if char == "(":
            return self._take(r"\((?!\?)|\(\?:|\(\?P?<[A-Za-z_]\w*>")
        if char == "{":
            return self._take(r"\{\d*,?\d*\}")
        self._place += 1
        if char == ".":
            return self._any()
        if char in _ESCAPES:
            return re.escape(_ESCAPES[char])
        return char

    def _any(self) -> str:
        line = _ESCAPES if "x{0}" in self._dot else {c: e for c, e in _ESCAPES.items() if c != "\n"}
        return f"(?:{_PLAIN}|(?-i:{'|'.join(map(re.escape, line.values()))}))"

    def _escape(self) -> str:
        text = self._take(r"\\(?:x[0-9a-fA-F]{2}|x\{[0-9a-fA-F]+\}|u[0-9a-fA-F]{4}|.)")
        kind = text[1]
        if kind in "dDwWsS":
            return _class(f"[{text}]")
        plain = {"n": "\n", "r": "\r", "t": "\t", "f": "\f"}.get(kind)
        if kind in "xu":
            code = int(text[2:].strip("{}"), 16)
            if code > 0x10FFFF:
                raise _refused(text)
            plain = chr(code)
        elif plain is None and kind.isalnum():
            raise _refused(text)
        plain = plain if plain is not None else kind
        if plain in _ESCAPES:
            return re.escape(_ESCAPES[plain])
        return text
