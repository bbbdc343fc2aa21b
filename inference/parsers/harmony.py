"""gpt-oss's Harmony format: messages on channels, each with a header of control tokens."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from inference.parsers.reasoning_parser import ReasoningMarkers, ReasoningParser
from inference.parsers.state_machine import Part, find_first, is_prefix, partial_suffix_length
from inference.parsers.tool_grammar import ToolCallFormat, lark_literal
from inference.parsers.tool_parser import ToolCallParser

CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", START)
#: Maximum characters of a message's header; longer text is content.
MAX_HEADER = 512
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")
_KINDS: dict[str, str] = {"analysis": "reasoning"}


class HarmonyParser(ReasoningParser):
    """Treats analysis as reasoning, messages to functions as calls, and all else as content."""

    name: ClassVar[str] = "gpt_oss"
    template_marks: ClassVar[tuple[str, ...]] = (CHANNEL, MESSAGE)
    markers: ClassVar[tuple[str, ...]] = (CHANNEL, MESSAGE, "<|constrain|>", *_ENDS)

    starts_in_reasoning: ClassVar[bool] = True

    @classmethod
    def marks(cls, *, constrained: bool, calls: bool) -> ReasoningMarkers:
        """Return the markers: constrained content follows its header, calls include theirs."""
        again = f"{START}assistant"
        if calls:
            return ReasoningMarkers((again,), "", f"<|end|>{again}")
        final = f"{CHANNEL}final{MESSAGE}"
        if constrained:
            return ReasoningMarkers((final,), "", f"<|end|>{again}{final}")
        return ReasoningMarkers(("<|end|>", final, f"{CHANNEL}commentary"), "", "<|end|>")

    @classmethod
    def switched(cls, variables: Mapping[str, Any]) -> bool | None:
        """Return None: an answer has headers whether or not reasoning is on."""
        return None

    def __init__(self, inside: bool | None = None) -> None:
        super().__init__(inside)
        self._kind = "content"
        self._num_calls = 0

    def _begin(self) -> bool:
        """Expect a message's header; without one, all text is content."""
        rest = self._buffer.lstrip()
        if rest.startswith((CHANNEL, START)):
            self._state = self._header
            return True
        if not self._is_finished and (not rest or is_prefix(rest, (CHANNEL, START))):
            return False
        self._trim = False
        self._kind, self._state = "content", self._body
        return bool(self._buffer)

    def _header(self) -> bool:
        header, mark, rest = self._buffer.partition(MESSAGE)
        if len(header) > MAX_HEADER + (0 if mark else len(MESSAGE)):
            return self._no_header()
        if not mark:
            if self._is_finished:
                self._buffer = ""  # a header without a message has no content
            return False
        self._buffer = rest
        recipient = _RECIPIENT.search(header)
        channel = header.rpartition(CHANNEL)[2].split("<")[0].split()
        self._kind = _KINDS.get(channel[0] if channel else "", "content")
        if recipient is not None:
            self._kind = "arguments"
            call_id = f"call_{secrets.token_hex(12)}"
            self._out.append(Part("call", recipient[1], self._num_calls, call_id))
            self._num_calls += 1
        self._trim, self._state = self._kind != "content", self._body
        return True

    def _no_header(self) -> bool:
        """Return text that began like a header but is too long for one as content."""
        self._trim, self._kind, self._state = False, "content", self._body
        mark = CHANNEL if self._buffer.startswith(CHANNEL) else START
        self._pass(mark)
        self._buffer = self._buffer[len(mark) :]
        return True

    def _body(self) -> bool:
        position, mark = find_first(self._buffer, _ENDS)
        if mark:
            self._pass(self._buffer[:position])
            self._buffer = (
                self._buffer[position:] if mark == START else self._buffer[position + len(mark) :]
            )
            self._state = self._begin
            return True
        keep = 0 if self._is_finished else partial_suffix_length(self._buffer, _ENDS)
        size = len(self._buffer) - keep
        self._pass(self._buffer[:size])
        self._buffer = self._buffer[size:]
        return False

    def _pass(self, text: str) -> None:
        if self._kind == "arguments":
            if text:
                self._out.append(Part("arguments", text, self._num_calls - 1))
        else:
            self._emit(self._kind, text)


# -- gpt-oss's calls are messages to functions, which its reasoning parser has already separated.


FINAL = f"{CHANNEL}final{MESSAGE}"
#: Ends a message and begins the next one.
NEXT = f"<|end|>{START}assistant"


@dataclass(frozen=True)
class MessagesLayout(ToolCallFormat):
    """Grammar of messages with headers: optional reasoning, then calls or the final text."""

    def _calls_or_text(self, special: dict[str, int], parallel: bool) -> list[str]:
        headers = [f"{CHANNEL}{name}{MESSAGE}" for name in ("analysis", "commentary")]
        other_headers = " | ".join(lark_literal(header, special) for header in headers)
        calls, final = self._all_calls(special, parallel), lark_literal(FINAL, special)
        return [
            f"start: before* ({calls} | {final} TEXT)",
            f"before: ({other_headers}) TEXT {lark_literal(NEXT, special)}",
            r"TEXT: /(.|\n)*/",
        ]


class HarmonyToolParser(ToolCallParser):
    """Defines the format of enforced calls; the content itself contains no calls to parse."""

    name = "gpt_oss"
    template_marks: ClassVar[tuple[str, ...]] = ("<|channel|>", "<|constrain|>")
    layout = MessagesLayout(
        call_start=f"{CHANNEL}commentary to=functions.NAME <|constrain|>json{MESSAGE}",
        call_end="",
        separator=NEXT,
        answer_prefix=FINAL,
    )

    def _text(self) -> bool:
        return self._plain_text()
