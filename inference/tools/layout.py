"""`Layout`: how an enforced call is written, and the grammar for it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.contract.errors import InvalidRequest
from inference.parsing.literals import first_of
from inference.tools.escaped_lark import escaped
from inference.tools.function import ToolFunction

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

        `special` has the texts of the model's control tokens, with their ids (see `literal`).
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
    inside = f"%lark {{\n{escaped(function.grammar)}\n}}"
    return [f"{rule}: {quote} {rule}_inside {quote}", f"{rule}_inside: {inside}"]


def raw_input(rule: str, function: ToolFunction) -> list[str]:
    """The same where texts stand as they are, between marks of their own."""
    return [f"{rule}: %lark {{\n{function.grammar}\n}}"]


def no_shared_rules(special: Mapping[str, int]) -> Sequence[str]:
    """For arguments that need no rules in common."""
    return ()


def checked_key(key: str, pattern: re.Pattern[str]) -> str:
    """A parameter's name that this way of writing calls can hold. Raises `InvalidRequest`."""
    if not pattern.fullmatch(key):
        raise InvalidRequest(
            f"This model's tool calls can't have a parameter named {key[:50]!r}.", param="tools"
        )
    return key


def closed_schema(function: ToolFunction) -> dict[str, object]:
    """The schema of a function's arguments. With `strict` each of its keywords counts."""
    options = {**_PYTHON_SPACES, "lenient": not function.strict}
    return {"type": "object", **function.parameters, "x-guidance": options}


@dataclass(frozen=True)
class Layout:
    """Texts around calls; NAME stands for the function's name in `begin`.

    Attributes:
        open, close: before the first call and after the last one.
        begin, end: of each call. separator: between two.
        trigger: what the calls, or each call, begin with; "" where calls are the whole answer.
        arguments: the grammar rules for the arguments. shared: gives, for the control tokens'
            ids, rules that all of them may use.
        before_answer: before an answer that comes instead of calls.
        free: whether text and calls can be told apart by a grammar.
    """

    begin: str
    end: str
    open: str = ""
    close: str = ""
    separator: str = "\n"
    trigger: str = ""
    arguments: ArgumentsRule = json_arguments
    shared: Callable[[Mapping[str, int]], Sequence[str]] = no_shared_rules
    before_answer: str = ""
    free: bool = True

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
            begin = self.begin.replace(_NAME, function.name)
            if not required and not self._trigger_opens:
                begin = begin.removeprefix(self.trigger)
            rule = f"arguments_{number}"
            rules.append(
                f"call_{number}: {literal(begin, special)} {rule} {literal(self.end, special)}"
            )
            rules += self.arguments(rule, function, special)
        calls = " | ".join(f"call_{number}" for number in range(len(functions)))
        if required:
            start = [f"start: {self._all_calls(special, parallel)}"]
            if answer is not None:
                before = literal(self.before_answer, special)
                start = [f"{start[0]} | answer", f"answer: {before} %json {json.dumps(answer)}"]
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
        separator = literal(self.separator, special)
        more = f"({separator} call){{0,{MAX_PARALLEL_CALLS - 1}}}" if parallel else ""
        opening = literal(self.open.removeprefix(skip), special)
        return f"{opening} call {more} {literal(self.close, special)}"

    def _triggered(self, special: dict[str, int], parallel: bool) -> list[str]:
        """Text, and after each trigger a whole call (or after the only one all of them)."""
        after, count = "call", "*" if parallel else "?"
        if self._trigger_opens:
            after, count = self._all_calls(special, parallel, skip=self.trigger), "?"
        mark = literal(self.trigger, special)
        if self.trigger in special:
            tag = [f"tagged: TEXT {mark} {after}"]
        else:
            tag = [f"tagged: trigger {after}", f"trigger[lazy]: TEXT {mark}"]
        return [f"start: tagged{count} rest", "rest: TEXT", r"TEXT: /(.|\n)*/", *tag]


def quoted(text: str) -> str:
    """A text as a JSON string, which Lark reads as well."""
    return json.dumps(text, ensure_ascii=False)


def text_until(closing: str, rule: str, special: Mapping[str, int]) -> tuple[str, list[str]]:
    """Any text up to `closing` and that itself: what to write for it, and the rules behind it."""
    place = first_of(closing, list(special))[0]
    if place < 0:
        return rule, [rf"{rule}[lazy]: /(.|\n)*/ {quoted(closing)}"]
    # A control token is none of the text's characters; white space before it counts as text.
    return rule, [rf"{rule}: /(.|\n)*/ {literal(closing[place:], special)}"]


def literal(text: str, special: Mapping[str, int]) -> str:
    """A text in Lark, with control tokens by their ids: `"Hm " <[17]> "x"`."""
    parts = []
    while text:
        place, found = first_of(text, list(special))
        head = text if place < 0 else text[:place]
        if head:
            parts.append(quoted(head))
        if place >= 0:
            parts.append(f"<[{special[found]}]>")
        text = "" if place < 0 else text[place + len(found) :]
    return " ".join(parts)
