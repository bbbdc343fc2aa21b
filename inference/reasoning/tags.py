"""Models that put their reasoning between two texts."""

from __future__ import annotations

from inference.reasoning.base import ReasoningParser

OPEN, CLOSE = "<think>", "</think>"


class DeepSeekR1Parser(ReasoningParser):
    """DeepSeek R1: every answer begins with reasoning; many prompts hold the opening tag."""

    name = "deepseek_r1"
    template_marks = (CLOSE, "<｜Assistant｜>")
    markers = (OPEN, CLOSE)
    starts, ends = (OPEN,), (CLOSE,)
    assumed = True


class Qwen3Parser(ReasoningParser):
    """Qwen 3 and most others: the model opens its reasoning, or the prompt opened or closed it."""

    name = "qwen3"
    template_marks = (CLOSE,)
    markers = (OPEN, CLOSE)
    starts, ends = (OPEN,), (CLOSE,)


class GraniteParser(ReasoningParser):
    """Granite 3.2: two sentences instead of tags."""

    name = "granite"
    template_marks = ("Here is my thought process:",)
    starts = ("Here is my thought process:", "Here's my thought process:")
    ends = ("Here is my response:", "Here's my response:")
