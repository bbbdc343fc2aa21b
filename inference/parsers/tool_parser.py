"""The base of tool parsers: a state machine for a growing text."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

from inference.parsers.json_stream import CallObject, ValueScanner
from inference.parsers.state_machine import (
    Part,
    StateMachine,
    find_first,
    is_prefix,
    partial_suffix_length,
)
from inference.parsers.tool_grammar import ToolCallFormat, ToolFunction

#: Maximum characters between a call's opening and its arguments; with more, it isn't a call.
MAX_HEADER = 256
#: Code fence, which models also write around calls.
FENCE = "```"
_FENCE_END = re.compile(r"(?<!`)```[A-Za-z_]{0,16}\Z")
#: A beginning of a fence.
_MAYBE_FENCE_END = re.compile(r"(?<!`)(?:``?|```[A-Za-z_]{0,16})\Z")


def _strip_gap(text: str, fence: re.Pattern[str]) -> str:
    """Strip trailing white space and a code fence, which may precede a call."""
    stripped = text.rstrip()
    match = fence.search(stripped, max(0, len(stripped) - 20))
    return stripped[: match.start()].rstrip() if match else stripped


class ToolCallParser(StateMachine):
    """Splits one output's text into content and calls.

    Arguments are emitted as the model generates them. No text is lost: text that begins like a call
    but isn't one is returned as content. Only white space next to a call, a code fence around it
    and repeated closing marks are dropped.

    Attributes:
        name: the parser's name in settings. template_marks: texts that all occur in the chat
            templates of this parser's models; () if templates can't identify them.
        markers: control tokens that must stay in the text.
        closers: marks that may follow a call.
        layout: format of an enforced call.
    """

    name: ClassVar[str]
    template_marks: ClassVar[tuple[str, ...]] = ()
    markers: ClassVar[tuple[str, ...]] = ()
    closers: ClassVar[tuple[str, ...]] = ()
    layout: ClassVar[ToolCallFormat]

    _opening = ""

    def __init__(self, functions: Sequence[ToolFunction] = ()) -> None:
        super().__init__(self._text)
        self.functions = {function.name: function for function in functions}
        self._gap = ""  # white space and a code fence before a possible call
        self._in_fence = False
        self._after_call = False
        self._has_open_text = False  # an opening that began no call was returned as content
        self._num_calls = 0
        self._object: CallObject | None = None
        self._scanner = ValueScanner()
        self._no_call = ""  # the object that wasn't a call

    # -- states ------------------------------------------------------------------------------

    def _text(self) -> bool:
        """Parse text outside of any call."""
        raise NotImplementedError

    def _plain_text(self) -> bool:
        """Return all further text as content."""
        text, self._buffer = self._buffer, ""
        self._emit(text)
        return False

    def _parse_object(self, opening: str, then: Callable[[], bool]) -> bool:
        """Parse a call's object. `opening` preceded it; `then` is the state after it."""
        if self._object is None:
            self._object = CallObject(self._call, self._arguments, self._is_function)
        reader = self._object
        self._buffer = self._buffer[reader.feed(self._buffer) :]
        if not (reader.done or reader.failed or self._is_finished):
            return False
        self._object, self._no_call = None, ""
        if not reader.certain:
            self._no_call, self._has_open_text = reader.raw, bool(opening)
            self._emit(self._gap + opening + reader.raw)
        self._state = then if reader.done else self._after_failure
        return True

    def _is_function(self, name: str) -> bool:
        """Whether an object with this name is a call; any name is, if the format is unambiguous."""
        return True

    def _after_failure(self) -> bool:
        """Return to text after an object that isn't a call."""
        self._state = self._text
        return True

    def _header(self, pattern: re.Pattern[str]) -> re.Match[str] | Literal[False] | None:
        """Consume the text before a call's arguments once it is complete.

        None while more text is needed; False if no further text could complete it.
        """
        match = pattern.match(self._buffer[:MAX_HEADER])
        if match is not None:
            self._buffer = self._buffer[match.end() :]
            return match
        return False if self._is_finished or len(self._buffer) >= MAX_HEADER else None

    def _fail(self, opening: str) -> bool:
        """Return `opening` as content, since no call followed it."""
        self._emit(self._gap + opening)
        self._has_open_text = True
        return self._after_failure()

    def _in_value(self, then: Callable[[], bool]) -> bool:
        """Parse the bare JSON of a call that has begun."""
        end = self._scanner.feed(self._buffer)
        size = len(self._buffer) if end is None else end
        self._arguments(self._buffer[:size])
        self._buffer = self._buffer[size:]
        if end is None and not self._is_finished:
            return False
        self._scanner = ValueScanner()
        self._state = then
        return True

    def _goto(self, state: Callable[[], bool]) -> bool:
        """Switch to another state."""
        self._state = state
        return True

    # -- helpers -----------------------------------------------------------------------------

    def _find_marker(self, *openers: str) -> str:
        """Emit content up to the first of `openers` and consume that; "" while there is none."""
        if self._in_fence:
            closes_fence = self._skip_text(FENCE)
            if closes_fence is None:
                return ""
            self._in_fence = not closes_fence
        closers = [closer for closer in self.closers if self._num_calls and closer in self.markers]
        marks = (*openers, *closers)
        while (match := find_first(self._buffer, marks))[1]:
            position, mark = match
            text = self._buffer[:position]
            self._buffer = self._buffer[position + len(mark) :]
            if mark in openers:
                content = _strip_gap(text, _FENCE_END)
                self._gap = text[len(content) :]
                self._emit(content)
                return mark
            # A closing mark that closes no call is content if its opening was.
            self._emit(text + mark if self._has_open_text else text.rstrip())
            self._after_call = not self._has_open_text
            self._has_open_text = False
        if self._is_finished:
            rest, self._buffer = self._buffer, ""
            self._emit(rest)
            return ""
        keep = partial_suffix_length(self._buffer, marks)
        head = self._buffer[: len(self._buffer) - keep]
        content = _strip_gap(head, _MAYBE_FENCE_END)
        self._emit(content)
        self._buffer = self._buffer[len(content) :]
        return ""

    def _skip_repeated(self, openers: Sequence[str]) -> bool | None:
        """Consume a repeated opening; None while undecided."""
        rest = self._buffer.lstrip()
        mark = next((opener for opener in openers if rest.startswith(opener)), "")
        if mark:
            size = len(self._buffer) - len(rest) + len(mark)
            self._opening += self._buffer[:size]
            self._buffer = self._buffer[size:]
            return True
        return None if is_prefix(rest, openers) and not self._is_finished else False

    def _skip_text(self, text: str) -> bool | None:
        """Consume white space and then `text`, if that comes next; None while undecided.

        At the end of all text a prefix of `text` counts as `text`.
        """
        rest = self._buffer.lstrip()
        if rest.startswith(text) or (self._is_finished and rest and text.startswith(rest)):
            self._buffer = rest[len(text) :]
            return True
        return None if text.startswith(rest) and not self._is_finished else False

    def _emit(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = self._in_fence = False
            self._out.append(Part("content", text))

    def _call(self, name: str, call_id: str = "") -> None:
        self._after_call, self._in_fence = True, self._in_fence or FENCE in self._gap
        self._gap, self._has_open_text = "", False
        call_id = call_id or f"call_{secrets.token_hex(12)}"
        self._out.append(Part("call", name, self._num_calls, call_id))
        self._num_calls += 1

    def _arguments(self, text: str) -> None:
        if text:
            self._out.append(Part("arguments", text, self._num_calls - 1))


# -- Calls between marks, in a section between two more marks: used by several formats.


class SectionParser(ToolCallParser):
    """Parses `section_begin (call_begin header arguments call_end)* section_end`.

    A call without its section is accepted too, and any closing mark may be missing. Unclosed
    arguments end where a mark begins, so that the next call is parsed.

    Attributes:
        section, call: opening and closing mark of the section and of a call. closing: marks that
            may end the arguments.
        header: matches the text between a call's opening and its arguments.
    """

    section: ClassVar[tuple[str, str]]
    call: ClassVar[tuple[str, str]]
    closing: ClassVar[tuple[str, ...]]
    header: ClassVar[re.Pattern[str]]

    def _begin(self, header: re.Match[str]) -> bool:
        """Emit the call whose header was parsed; return whether its arguments follow."""
        raise NotImplementedError

    def _text(self) -> bool:
        section, call = self.section[0], self.call[0]
        self._opening = self._find_marker(section, call)
        if self._opening:
            self._state = self._call_start if self._opening == section else self._name
        return bool(self._opening)

    def _call_start(self) -> bool:
        repeated = self._skip_repeated(self.section[:1])
        if repeated is not False:
            return bool(repeated)
        has_call = self._skip_text(self.call[0])
        if has_call is None:
            return False
        if not has_call:
            return self._fail(self._opening)
        self._opening += self.call[0]
        return self._goto(self._name)

    def _name(self) -> bool:
        repeated = self._skip_repeated((self.section[0], self.call[0]))
        if repeated is not False:
            return bool(repeated)
        header = self._header(self.header)
        if header is None:
            return False
        if header is False:
            return self._fail(self._opening)
        follow = self._begin(header)
        return self._goto(self._call_arguments if follow else self._after_arguments)

    def _call_arguments(self) -> bool:
        self._scanner.to_mark = True
        return self._in_value(self._after_arguments)

    def _after_arguments(self) -> bool:
        """Consume closing marks in order, each optional, up to text or another call."""
        for mark, state in (
            *((mark, self._after_arguments) for mark in self.closing),
            (self.call[0], self._name),
            (self.section[1], self._text),
        ):
            has_mark = self._skip_text(mark)
            if has_mark is None:
                return False
            if has_mark:
                self._opening = mark
                return self._goto(state)
        return self._goto(self._text)
