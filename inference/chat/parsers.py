"""Which parsers read a model's answers to a request."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from engine.contract.sampling_params import ThinkingParams
from engine.text import Tokenizer
from inference.chat.output_parser import ParserPlan
from inference.errors import UnsupportedField
from inference.generation import Served
from inference.openai.schemas import ChatRequest
from inference.reasoning import ReasoningParser, reasoning_parsers
from inference.tools import JsonParser, ToolFunction, ToolParser, tool_parsers
from inference.tools.layout import Layout


@dataclass(frozen=True)
class ModelParsers:
    """The parsers of one request's model.

    Attributes:
        tools: None when the request offers no tools. functions: those it offers.
        reasoning: None for a model that doesn't reason.
        kept_tokens: control tokens that must stay in the text.
    """

    chat: ChatRequest
    tools: type[ToolParser] | None
    functions: tuple[ToolFunction, ...]
    reasoning: type[ReasoningParser] | None
    kept_tokens: frozenset[int]

    @classmethod
    def of(cls, chat: ChatRequest, served: Served) -> ModelParsers:
        """Raises `UnsupportedField` for tools that the model has no use for."""
        functions = chat.functions_in_use
        tools = _tool_parser(chat, served) if functions else None
        reasoning = reasoning_parser(served)
        found = [parser for parser in (tools, reasoning) if parser is not None]
        markers = [marker for parser in found for marker in parser.markers]
        return cls(chat, tools, functions, reasoning, _special(served.tokenizer, markers))

    def plan(self, inside: bool | None, thinking: ThinkingParams | None) -> ParserPlan:
        """How outputs are read after a prompt that ends inside (or past) the reasoning."""
        reasoning = tools = None
        if self.reasoning is not None:
            reasoning = partial(self.reasoning, inside)
        if self.tools is not None:
            tools = partial(self.tools, self.functions)
        return ParserPlan(
            reasoning=reasoning,
            tools=tools,
            parallel=self.chat.parallel_tool_calls is not False,
            shows_reasoning=self.chat.include_reasoning is not False,
            thinking=thinking,
            named=self.chat.named_function is not None,
            forced=self.chat.forces_calls,
            custom=self.chat.custom_tools,
        )

    @property
    def layout(self) -> Layout:
        """How an enforced call is written. Only with `tools`."""
        return (self.tools or JsonParser).layout

    @property
    def callable_functions(self) -> tuple[ToolFunction, ...]:
        """The functions that may be called now: the one that was named, or all."""
        named = self.chat.named_function
        return tuple(each for each in self.functions if named in (None, each.name))


def _tool_parser(chat: ChatRequest, served: Served) -> type[ToolParser]:
    """The model's own parser; where calls are enforced any model can make them, as JSON."""
    template, configured = served.tokenizer.chat_template or "", served.info.tool_call_parser
    if configured:
        parser = tool_parsers.get(configured)
        if parser is None:
            raise _unknown("tool_call_parser", configured, "tools")
        return parser
    parser = tool_parsers.for_template(template) if "tools" in template else None
    if parser is None and chat.forces_calls:
        return JsonParser
    if parser is None:
        raise UnsupportedField(
            f"The model '{served.name}' was not trained to call tools in a way that is supported.",
            param="tools",
        )
    return parser


def reasoning_parser(served: Served) -> type[ReasoningParser] | None:
    """The model's configured parser ("none" for none), or the one that its template tells of."""
    configured = served.info.reasoning_parser
    if configured == "none":
        return None
    if not configured:
        return reasoning_parsers.for_template(served.tokenizer.chat_template or "")
    parser = reasoning_parsers.get(configured)
    if parser is None:
        raise _unknown("reasoning_parser", configured, "model")
    return parser


def _unknown(setting: str, name: str, param: str) -> UnsupportedField:
    return UnsupportedField(
        f"The model is set up with the {setting} {name!r}, which this gateway doesn't have.",
        param=param,
    )


def _special(tokenizer: Tokenizer, markers: list[str]) -> frozenset[int]:
    """Ids of those markers that are special tokens, which texts usually leave out."""
    special = tokenizer.special_tokens
    return frozenset(tokenizer.added_token(marker).id for marker in markers if marker in special)
