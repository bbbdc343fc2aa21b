"""Calls between marks of their own, in a section between two more: what such formats share."""

from __future__ import annotations

import re
from typing import ClassVar

from inference.tools.base import ToolParser


class SectionParser(ToolParser):
    """Reads `section_begin (call_begin header arguments call_end)* section_end`.

    A call without its section is read as well, and each closing mark may be missing. Arguments
    that aren't closed end where a mark begins, so that the next call is one.

    Attributes:
        section, call: how each begins and ends. closing: marks that may end a call's arguments.
        header: what stands between a call's beginning and its arguments.
    """

    section: ClassVar[tuple[str, str]]
    call: ClassVar[tuple[str, str]]
    closing: ClassVar[tuple[str, ...]]
    header: ClassVar[re.Pattern[str]]

    _opening = ""

    def _begin(self, header: re.Match[str]) -> bool:
        """A call's header was read: tell of the call. Whether its arguments follow."""
        raise NotImplementedError

    def _text(self) -> bool:
        section, call = self.section[0], self.call[0]
        self._opening = self._find(section, call)
        if self._opening:
            self._state = self._before_call if self._opening == section else self._name
        return bool(self._opening)

    def _before_call(self) -> bool:
        found = self._skip(self.call[0])
        if found is None:
            return False
        if not found:
            return self._fail(self._opening)
        self._opening += self.call[0]
        return self._then(self._name)

    def _name(self) -> bool:
        header = self._header(self.header)
        if header is None:
            return False
        if header is False:
            return self._fail(self._opening)
        follow = self._begin(header)
        return self._then(self._call_arguments if follow else self._after_arguments)

    def _call_arguments(self) -> bool:
        self._scanner.to_mark = True
        return self._in_value(self._after_arguments)

    def _after_arguments(self) -> bool:
        """Closing marks, in their order but each optional; perhaps another call."""
        for mark, state in (
            *((mark, self._after_arguments) for mark in self.closing),
            (self.call[0], self._name),
            (self.section[1], self._text),
        ):
            found = self._skip(mark)
            if found is None:
                return False
            if found:
                self._opening = mark
                return self._then(state)
        return self._then(self._text)
