"""Models whose reasoning stands between control tokens of their own."""

from __future__ import annotations

from typing import Any, ClassVar

from inference.parsing.literals import first_of, is_beginning, may_begin
from inference.reasoning.base import ReasoningParser


class ControlParser(ReasoningParser):
    """In the answer these tokens are no text: a start begins more reasoning, others vanish.

    Attributes:
        around: further ones, around the answer; the first begins it.
    """

    around: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        own = "markers" in cls.__dict__
        super().__init_subclass__(**options)
        if not own:
            cls.markers = (*cls.markers, *cls.around)

    @classmethod
    def prompt_is_inside(cls, tail: str) -> bool | None:
        """A prompt may end in the answer, too."""
        if tail.rstrip().endswith(cls.around[:1]):
            return False
        return super().prompt_is_inside(tail)

    def _content(self) -> bool:
        tags = self.starts + self.ends + self.around
        place, tag = first_of(self._held, tags)
        if not tag:
            self._show(len(self._held) - (0 if self._ended else may_begin(self._held, tags)))
            return False
        self._show(place)
        if not self._ended and is_beginning(self._held, tags):
            return False  # there is a longer one
        self._held = self._held[len(tag) :]
        if tag in self.starts:
            self._trim, self._state = True, self._reasoning
        return True

    def _show(self, end: int) -> None:
        self._emit("content", self._held[:end])
        self._held = self._held[end:]


class SeedOssParser(ControlParser):
    """Seed OSS."""

    name = "seed_oss"
    template_marks = ("seed:think>",)
    starts, ends = ("<seed:think>",), ("</seed:think>",)
    calls = ("<seed:tool_call>",)
    assumed = True


class MiniMaxM3Parser(ControlParser):
    """MiniMax M3: `thinking_mode` enabled, disabled or adaptive."""

    name = "minimax_m3"
    template_marks = ("mm:think>",)
    starts, ends = ("<mm:think>",), ("</mm:think>",)
    opened = True
    switches = ("thinking_mode",)


class K2HorizonParser(ControlParser):
    """K2 Horizon: a pair of tags for each effort."""

    name = "k2_horizon"
    template_marks = ("<ifm|think",)
    starts = ("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>")
    ends = ("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>")
    calls = ("<ifm|tool_calls>",)
    assumed = True


class Gemma4Parser(ControlParser):
    """Gemma 4: the channel's name is no reasoning."""

    name = "gemma4"
    template_marks = ("<|channel>", "<channel|>")
    starts, ends = ("<|channel>thought\n", "<|channel>"), ("<channel|>",)
    calls = ("<|tool_call>",)


class MistralParser(ControlParser):
    """Magistral; its first release wrote tags of plain text."""

    name = "mistral"
    template_marks = ("[THINK]", "[/THINK]")
    starts, ends = ("[THINK]", "<think>"), ("[/THINK]", "</think>")
    calls = ("[TOOL_CALLS]",)


class Plamo3Parser(ControlParser):
    """PLaMo 3."""

    name = "plamo3"
    template_marks = ("<|plamo:begin_think:plamo|>",)
    starts, ends = ("<|plamo:begin_think:plamo|>",), ("<|plamo:end_think:plamo|>",)
    calls = ("<|plamo:begin_tool_requests:plamo|>",)
    assumed = True


class KimiK3Parser(ControlParser):
    """Kimi K3: the reasoning and the answer each have a channel."""

    name = "kimi_k3"
    template_marks = ("<|open|>", "<|sep|>", "think")
    markers = ("<|open|>", "<|close|>", "<|sep|>")
    starts, ends = ("<|open|>think<|sep|>",), ("<|close|>think<|sep|>",)
    around = ("<|open|>response<|sep|>", "<|close|>response<|sep|>")
    assumed = True


class InklingParser(ControlParser):
    """Inkling: an output is blocks, each of a kind."""

    name = "inkling"
    template_marks = ("<|content_thinking|>",)
    markers = (
        *("<|message_model|>", "<|content_thinking|>", "<|content_text|>"),
        *("<|end_message|>", "<|content_model_end_sampling|>"),
    )
    starts = ("<|content_thinking|>", "<|message_model|><|content_thinking|>")
    ends = ("<|end_message|>",)
    around = ("<|content_text|>", "<|message_model|>", "<|content_model_end_sampling|>")


class CohereCommand3Parser(ControlParser):
    """Command A Reasoning. Citations in its text stay as they are."""

    name = "cohere_command3"
    template_marks = ("<|START_THINKING|>", "<|START_RESPONSE|>")
    starts, ends = ("<|START_THINKING|>",), ("<|END_THINKING|>",)
    calls = ("<|START_ACTION|>",)
    around = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")


class CohereCommand4Parser(CohereCommand3Parser):
    """Command A Plus."""

    name = "cohere_command4"
    template_marks = ("<|START_THINKING|>", "<|START_TEXT|>")
    around = ("<|START_TEXT|>", "<|END_TEXT|>")
