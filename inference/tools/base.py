"""What a tool parser is: a small state machine over a growing text."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

from inference.parsing.call_object import CallObject
from inference.parsing.json_scan import ValueScanner
from inference.parsing.literals import first_of, may_begin
from inference.parsing.machine import StateMachine
from inference.parsing.parts import Part
from inference.tools.function import ToolFunction
from inference.tools.layout import Layout

#: What stands between a call's opening and its arguments is shorter, or it is no call.
MAX_HEADER = 256


class ToolParser(StateMachine):
    """Takes one output's text apart into content and calls.

    Arguments come out as the model writes them. Nothing is lost: what begins like a call and isn't
    one comes out as content. White space right before and right after a call belongs to neither.

    Attributes:
        name: in settings. template_marks: texts, all of which a chat template writes whose models
            are read by this parser; () for one that isn't told by templates.
        markers: control tokens that must stay in the text.
        layout: how a call that is enforced looks.
    """

    name: ClassVar[str]
    template_marks: ClassVar[tuple[str, ...]] = ()
    markers: ClassVar[tuple[str, ...]] = ()
    layout: ClassVar[Layout]

    def __init__(self, functions: Sequence[ToolFunction] = ()) -> None:
        super().__init__(self._text)
        self.functions = {function.name: function for function in functions}
        self._gap = ""
        self._after_call = False
        self._num_calls = 0
        self._object: CallObject | None = None
        self._scanner = ValueScanner()
        self._no_call = ""  # the object that was no call

    # -- states ------------------------------------------------------------------------------

    def _text(self) -> bool:
        """Ordinary text, outside of any call."""
        raise NotImplementedError

    def _plain(self) -> bool:
        """Nothing but content from here on."""
        held, self._held = self._held, ""
        self._emit(held)
        return False

    def _in_object(self, opening: str, then: Callable[[], bool]) -> bool:
        """Inside a call's object. `opening` stood before it; `then` is the state after it."""
        if self._object is None:
            self._object = CallObject(self._call, self._arguments, self._is_function)
        reader = self._object
        self._held = self._held[reader.feed(self._held) :]
        if not (reader.done or reader.failed or self._ended):
            return False
        self._object, self._no_call = None, ""
        if not reader.certain:
            self._no_call = reader.raw
            self._emit(self._gap + opening + reader.raw)
        self._state = then if reader.done else self._after_failure
        return True

    def _is_function(self, name: str) -> bool:
        """Whether an object with this name is a call; any is, where nothing else looks like one."""
        return True

    def _after_failure(self) -> bool:
        """After something that began like a call and went wrong: text again."""
        self._state = self._text
        return True

    def _header(self, pattern: re.Pattern[str]) -> re.Match[str] | Literal[False] | None:
        """What stands before a call's arguments, once it is whole, and takes it.

        None while more text is needed; False when no more text could help.
        """
        found = pattern.match(self._held[:MAX_HEADER])
        if found is not None:
            self._held = self._held[found.end() :]
            return found
        return False if self._ended or len(self._held) >= MAX_HEADER else None

    def _fail(self, opening: str) -> bool:
        """What `opening` began is no call."""
        self._emit(self._gap + opening)
        return self._after_failure()

    def _in_value(self, then: Callable[[], bool]) -> bool:
        """Inside the bare JSON of a call that has begun."""
        end = self._scanner.feed(self._held)
        size = len(self._held) if end is None else end
        self._arguments(self._held[:size])
        self._held = self._held[size:]
        if end is None and not self._ended:
            return False
        self._scanner = ValueScanner()
        self._state = then
        return True

    def _then(self, state: Callable[[], bool]) -> bool:
        """Go on in another state."""
        self._state = state
        return True

    # -- helpers -----------------------------------------------------------------------------

    def _find(self, *openers: str) -> str:
        """Emit content up to the first of `openers` and take that; "" while there is none."""
        place, opener = first_of(self._held, openers)
        if opener:
            before = self._held[:place]
            shown = before.rstrip()
            self._gap = before[len(shown) :]
            self._emit(shown)
            self._held = self._held[place + len(opener) :]
            return opener
        if self._ended:
            held, self._held = self._held, ""
            self._emit(held)
            return ""
        keep = may_begin(self._held, openers)
        head = self._held[: len(self._held) - keep]
        shown = head.rstrip()  # white space at the end may turn out to stand before a call
        self._emit(shown)
        self._held = self._held[len(shown) :]
        return ""

    def _skip(self, text: str) -> bool | None:
        """Take white space and then `text`, if that comes next; None while that can't be told.

        At the end of all text a beginning of `text` counts as the whole.
        """
        rest = self._held.lstrip()
        if rest.startswith(text) or (self._ended and rest and text.startswith(rest)):
            self._held = rest[len(text) :]
            return True
        return None if text.startswith(rest) and not self._ended else False

    def _emit(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            self._out.append(Part("content", text))

    def _call(self, name: str, call_id: str = "") -> None:
        self._after_call = True
        call_id = call_id or f"call_{secrets.token_hex(12)}"
        self._out.append(Part("call", name, self._num_calls, call_id))
        self._num_calls += 1

    def _arguments(self, text: str) -> None:
        if text:
            self._out.append(Part("arguments", text, self._num_calls - 1))
