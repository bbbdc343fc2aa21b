"""Models that write their calls as a list of JSON objects between texts of their own."""

from __future__ import annotations

from typing import ClassVar

from inference.tools.layout import Layout
from inference.tools.objects import ObjectListParser


class HunyuanA13BParser(ObjectListParser):
    """Hunyuan A13B: `<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>`."""

    name = "hunyuan_a13b"
    template_marks: ClassVar[tuple[str, ...]] = ("<tool_calls>", "<answer>")
    openers = ("<tool_calls>",)
    closers = ("</tool_calls>",)
    markers = openers + closers
    layout = Layout(
        open="<tool_calls>[",
        begin='{"name": "NAME", "arguments": ',
        end="}",
        separator=", ",
        close="]</tool_calls>",
        trigger="<tool_calls>",
    )


class JambaParser(HunyuanA13BParser):
    """Jamba: the same, an object on each line."""

    name = "jamba"
    template_marks: ClassVar[tuple[str, ...]] = ("<tool_calls>",)
    layout = Layout(
        open="<tool_calls>[\n    ",
        begin='{"name": "NAME", "arguments": ',
        end="}",
        separator=",\n    ",
        close="\n]</tool_calls>",
        trigger="<tool_calls>",
    )


class Phi4MiniJsonParser(ObjectListParser):
    """Phi 4 mini: `functools[{"name": ..., "arguments": {...}}]`."""

    name = "phi4_mini_json"
    template_marks: ClassVar[tuple[str, ...]] = ("functools",)
    openers = ("functools",)
    layout = Layout(
        open="functools[",
        begin='{"name": "NAME", "arguments": ',
        end="}",
        separator=", ",
        close="]",
        trigger="functools",
    )


class InternLMParser(ObjectListParser):
    """InternLM 2: `<|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>`."""

    name = "internlm"
    template_marks: ClassVar[tuple[str, ...]] = ("<|plugin|>",)
    openers = ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>")
    closers = ("<|action_end|>",)
    markers = ("<|action_start|>", "<|plugin|>", "<|action_end|>")
    layout = Layout(
        begin='<|action_start|><|plugin|>{"name": "NAME", "parameters": ',
        end="}<|action_end|>",
        separator="\n",
        trigger="<|action_start|><|plugin|>",
    )


class XlamParser(ObjectListParser):
    """xLAM: a list by itself, in a fenced block or after a mark, with or without text before it."""

    name = "xlam"
    openers = ("[TOOL_CALLS]", "<tool_call>", "```", "[")
    closers = ("```", "</tool_call>")
    markers = ("[TOOL_CALLS]", "<tool_call>", "</tool_call>")
    layout = Layout(
        open="[",
        begin='{"name": "NAME", "arguments": ',
        end="}",
        separator=", ",
        close="]",
    )

    def _text(self) -> bool:
        found = super()._text()
        if self._opening == "[":
            self._held, self._opening = "[" + self._held, ""
        return found

    def _no_list(self) -> bool:
        """A fence may say what it holds."""
        if self._opening == "```":
            if self._held.startswith("json"):
                self._take(len("json"))
                return True
            if not self._ended and "json".startswith(self._held):
                return False
        return super()._no_list()
