"""`OutputParser`: one output through its reasoning parser and then its tool parser."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.contract.sampling_params import ThinkingParams
from inference.parsing.parts import BEGINNINGS, Part, joined
from inference.reasoning import ReasoningParser
from inference.tools import ToolParser
from inference.tools.custom import CustomCalls


@dataclass(frozen=True)
class ParserPlan:
    """How each output of a request is read.

    Attributes:
        reasoning, tools: make a parser for one output; None where there is nothing to find.
        parallel: False: calls after the first are left out.
        shows_reasoning: False: reasoning is left out.
        named: the client said which function to call.
        forced: nothing but calls may come: the beginning of one that was cut off is no text.
        custom: tools whose calls hold a text instead of arguments.
        thinking: how reasoning is told in tokens, to count them; None where there can't be any.
    """

    reasoning: Callable[[], ReasoningParser] | None = None
    tools: Callable[[], ToolParser] | None = None
    parallel: bool = True
    shows_reasoning: bool = True
    named: bool = False
    forced: bool = False
    thinking: ThinkingParams | None = None
    custom: frozenset[str] = frozenset()

    @property
    def plain(self) -> bool:
        """Whether all text is content."""
        return self.reasoning is None and self.tools is None


class OutputParser:
    """Text in, parts out. All parts together don't depend on how the text was cut."""

    def __init__(self, plan: ParserPlan) -> None:
        self._plan = plan
        self._reasoning = plan.reasoning() if plan.reasoning is not None else None
        self._tools = plan.tools() if plan.tools is not None else None
        self._custom = CustomCalls(plan.custom) if plan.custom else None
        self.num_calls = 0

    def push(self, text: str, *, ended: bool = False) -> list[Part]:
        """What is certain after this text; with `ended` all that is left."""
        parts = self._split(text, ended)
        read = list(self._read(parts))
        if ended and self._tools is not None:
            left = self._tools.flush()
            read += [part for part in left if not (self._plan.forced and part.kind == "content")]
        if self._custom is not None:
            read = self._custom.push(read, ended=ended)
        return joined(part for part in read if self._wanted(part))

    def _split(self, text: str, ended: bool) -> list[Part]:
        if self._reasoning is None:
            return [Part("content", text)]
        parts = self._reasoning.push(text)
        return parts + self._reasoning.flush() if ended else parts

    def _read(self, parts: Iterable[Part]) -> Iterable[Part]:
        for part in parts:
            if self._tools is None:
                if part.kind == "arguments":  # of a function that nobody offered
                    yield Part("content", part.text)
                elif part.kind != "call":
                    yield part
            elif part.kind == "content":
                yield from self._tools.push(part.text)
            else:
                yield part

    def _wanted(self, part: Part) -> bool:
        if part.kind == "reasoning":
            return self._plan.shows_reasoning
        if part.kind in BEGINNINGS:
            self.num_calls = max(self.num_calls, part.call + 1)
        return self._plan.parallel or part.call == 0
