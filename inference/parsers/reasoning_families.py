"""Reasoning parsers of model families, all based on `ReasoningParser`."""

from __future__ import annotations

from typing import Any, ClassVar

from inference.parsers.reasoning_parser import ReasoningParser
from inference.parsers.state_machine import Part, find_first, is_prefix, partial_suffix_length

# -- Models whose reasoning is delimited by control tokens.


class ControlParser(ReasoningParser):
    """Removes the delimiters from the answer too: a start tag there begins more reasoning.

    Attributes:
        around: further control tokens, which surround the answer; the first begins it.
    """

    around: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        has_markers = "markers" in cls.__dict__
        super().__init_subclass__(**options)
        if not has_markers:
            cls.markers = (*cls.markers, *cls.around)

    @classmethod
    def prompt_opens_reasoning(cls, tail: str) -> bool | None:
        """Return False for a prompt that ends inside the answer."""
        if tail.rstrip().endswith(cls.around[:1]):
            return False
        return super().prompt_opens_reasoning(tail)

    def _content(self) -> bool:
        tags = self.starts + self.ends + self.around
        position, tag = find_first(self._buffer, tags)
        if not tag:
            self._show(
                len(self._buffer)
                - (0 if self._is_finished else partial_suffix_length(self._buffer, tags))
            )
            return False
        self._show(position)
        if not self._is_finished and is_prefix(self._buffer, tags):
            return False  # a longer tag may match
        self._buffer = self._buffer[len(tag) :]
        if tag in self.starts:
            self._trim, self._state = True, self._reasoning
        return True

    def _show(self, end: int) -> None:
        self._emit("content", self._buffer[:end])
        self._buffer = self._buffer[end:]


class SeedOssParser(ControlParser):
    """Seed OSS."""

    name = "seed_oss"
    template_marks = ("seed:think>",)
    starts, ends = ("<seed:think>",), ("</seed:think>",)
    calls = ("<seed:tool_call>",)
    starts_in_reasoning = True


class MiniMaxM3Parser(ControlParser):
    """MiniMax M3: `thinking_mode` enabled, disabled or adaptive."""

    name = "minimax_m3"
    template_marks = ("mm:think>",)
    starts, ends = ("<mm:think>",), ("</mm:think>",)
    template_opens = True
    template_switches = ("thinking_mode",)


class K2HorizonParser(ControlParser):
    """K2 Horizon: a different pair of tags for each effort."""

    name = "k2_horizon"
    template_marks = ("<ifm|think",)
    starts = ("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>")
    ends = ("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>")
    calls = ("<ifm|tool_calls>",)
    starts_in_reasoning = True


class Gemma4Parser(ControlParser):
    """Gemma 4: the channel's name is not part of the reasoning."""

    name = "gemma4"
    template_marks = ("<|channel>", "<channel|>")
    starts, ends = ("<|channel>thought\n", "<|channel>"), ("<channel|>",)
    calls = ("<|tool_call>",)


class MistralParser(ControlParser):
    """Magistral; its first release wrote the tags as plain text."""

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
    starts_in_reasoning = True


class KimiK3Parser(ControlParser):
    """Kimi K3: separate channels for the reasoning and the answer."""

    name = "kimi_k3"
    template_marks = ("<|open|>", "<|sep|>", "think")
    markers = ("<|open|>", "<|close|>", "<|sep|>")
    starts, ends = ("<|open|>think<|sep|>",), ("<|close|>think<|sep|>",)
    around = ("<|open|>response<|sep|>", "<|close|>response<|sep|>")
    starts_in_reasoning = True


class InklingParser(ControlParser):
    """Inkling: an output is a sequence of typed blocks."""

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
    """Command A Reasoning. Citations in the answer stay unchanged."""

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


OPEN, CLOSE = "<think>", "</think>"


class DeepSeekR1Parser(ReasoningParser):
    """DeepSeek R1: every output begins with reasoning; many prompts contain the opening tag."""

    name = "deepseek_r1"
    template_marks: ClassVar[tuple[str, ...]] = (CLOSE, "<｜Assistant｜>")
    starts, ends = (OPEN,), (CLOSE,)
    calls: ClassVar[tuple[str, ...]] = ("<｜tool▁calls▁begin｜>", "<｜tool_calls_begin｜>")
    starts_in_reasoning = True


class DeepSeekV3Parser(ReasoningParser):
    """DeepSeek V3.1 and 3.2: no reasoning unless the prompt or template variables enable it."""

    name = "deepseek_v3"
    starts, ends = (OPEN,), (CLOSE,)
    calls = ("<｜tool▁calls▁begin｜>", "<｜DSML｜function_calls>")
    template_opens = True


class DeepSeekV4Parser(DeepSeekR1Parser):
    """DeepSeek V4: calls may follow the reasoning without a closing tag."""

    name = "deepseek_v4"
    template_marks = ()
    calls = ("<｜DSML｜tool_calls>", "<｜DSML｜function_calls>", "<｜DSML｜ calls>")


class Glm45Parser(ReasoningParser):
    """GLM 4.5 and similar models: they usually reason; calls may follow without a closing tag."""

    name = "glm45"
    starts, ends = (OPEN,), (CLOSE,)
    calls = ("<tool_call>",)
    starts_in_reasoning = True


class KimiK2Parser(Glm45Parser):
    """Kimi K2 Thinking."""

    name = "kimi_k2"
    template_marks = (CLOSE, "<|tool_calls_section_begin|>")
    calls = ("<|tool_calls_section_begin|>",)


class MiniMaxM2Parser(Glm45Parser):
    """MiniMax M2: the prompt opens the reasoning."""

    name = "minimax_m2"
    calls = ("<minimax:tool_call>",)


class MiniMaxM2AppendThinkParser(MiniMaxM2Parser):
    """MiniMax M2 with reasoning and tags in the content, which the model expects in later turns."""

    name = "minimax_m2_append_think"

    def _begin(self) -> bool:
        rest = self._buffer.lstrip()
        if not self._is_finished and (not rest or is_prefix(rest, self.starts)):
            return False
        if self._buffer and not rest.startswith(self.starts):
            self._out.append(Part("content", OPEN))
        self._trim, self._state = False, self._content
        return bool(self._buffer)


class Qwen3Parser(ReasoningParser):
    """Qwen 3 and most others: the model opens its reasoning, or the prompt opens or closes it."""

    name = "qwen3"
    template_marks: ClassVar[tuple[str, ...]] = (CLOSE,)
    starts, ends = (OPEN,), (CLOSE,)
    calls: ClassVar[tuple[str, ...]] = ("<tool_call>",)


class HyV3Parser(Qwen3Parser):
    """Hunyuan 3: a reasoning effort turns reasoning on."""

    name = "hy_v3"
    template_marks = ()
    calls = ("<tool_calls>",)
    template_opens = True
    template_switches = ("reasoning_effort",)


class GraniteParser(ReasoningParser):
    """Granite 3.2: two sentences serve as tags."""

    name = "granite"
    template_marks = ("Here is my thought process:",)
    starts = ("Here is my thought process:", "Here's my thought process:")
    ends = ("Here is my response:", "Here's my response:")


class WrappedAnswerParser(ReasoningParser):
    """Removes a pair of tags around the answer.

    Attributes:
        answer_tags: opening and closing tag of the answer.
    """

    answer_tags: ClassVar[tuple[str, str]]

    def __init__(self, inside: bool | None = None) -> None:
        super().__init__(inside)
        self._frame_decided = False
        self._framed = inside is False  # the prompt may have opened the answer's tag

    @classmethod
    def prompt_opens_reasoning(cls, tail: str) -> bool | None:
        """Return False for a prompt that ends inside the answer's tags."""
        if tail.rstrip().endswith(cls.answer_tags[0]):
            return False
        return super().prompt_opens_reasoning(tail)

    def _content(self) -> bool:
        if not self._frame_decided and not self._detect_frame():
            return False
        if not self._framed:
            return super()._content()
        position, tag = find_first(self._buffer, self.answer_tags[1:])
        if tag and not self._buffer[position + len(tag) :].strip():
            self._emit_answer(position)
            if self._is_finished:
                self._buffer = ""
            return False
        if tag:  # more text follows, so the tag is part of the answer
            self._emit_answer(position + len(tag), keep_space=True)
            return True
        self._emit_answer(
            len(self._buffer)
            - (
                0
                if self._is_finished
                else partial_suffix_length(self._buffer, self.answer_tags[1:])
            )
        )
        return False

    def _detect_frame(self) -> bool:
        """Look for the answer's opening tag; return False while more text is needed."""
        rest, openers = self._buffer.lstrip(), self.answer_tags[:1]
        if not self._is_finished and (not rest or is_prefix(rest, openers)):
            return False
        if rest.startswith(openers):
            self._buffer, self._trim, self._framed = rest[len(openers[0]) :], True, True
        self._frame_decided = True
        return True

    def _emit_answer(self, end: int, *, keep_space: bool = False) -> None:
        """Emit the text before `end`; trailing white space waits for the text after it."""
        text = self._buffer[:end]
        text = (
            text
            if keep_space or (self._is_finished and end == len(self._buffer))
            else text.rstrip()
        )
        self._emit("content", text)
        self._buffer = self._buffer[len(text) :]


class HunyuanA13BParser(WrappedAnswerParser):
    """Hunyuan A13B."""

    name = "hunyuan_a13b"
    template_marks = (CLOSE, "<answer>")
    starts, ends = (OPEN,), (CLOSE,)
    calls = ("<tool_calls>",)
    answer_tags = ("<answer>", "</answer>")


class Ernie45Parser(WrappedAnswerParser):
    """ERNIE 4.5."""

    name = "ernie45"
    template_marks = (CLOSE, "<response>")
    starts, ends = (OPEN,), (CLOSE,)
    calls = ("<tool_call>",)
    answer_tags = ("<response>", "</response>")
    starts_in_reasoning = True
