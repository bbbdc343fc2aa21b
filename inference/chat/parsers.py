"""Selects the parsers for a model's answers to a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from engine.contract.errors import InvalidRequest
from engine.contract.json_schema import InexactNumber, enforced_schema
from engine.contract.sampling_params import ReasoningParams
from engine.contract.structured_outputs import JSON_WHITESPACE, StructuredOutputsParams
from engine.text.tokenizer import Tokenizer
from inference.errors import UnsupportedField
from inference.parsers.custom_tools import CustomToolCalls
from inference.parsers.json_tools import JsonParser
from inference.parsers.reasoning_parser import ReasoningParser
from inference.parsers.registry import reasoning_parsers, tool_parsers
from inference.parsers.state_machine import START_KINDS, Part, merge_adjacent
from inference.parsers.tool_grammar import ToolCallFormat, ToolFunction
from inference.parsers.tool_parser import ToolCallParser
from inference.request.job import ResolvedModel
from inference.schemas.chat import ChatRequest
from inference.schemas.sampling import OutputConstraint


@dataclass(frozen=True)
class OutputParserConfig:
    """Parser configuration shared by all outputs of a request.

    Attributes:
        reasoning, tools: create a parser for one output; None if there is nothing to parse.
        parallel: False: calls after the first are left out.
        shows_reasoning: False: reasoning is left out.
        named_tool: the client named the function to call.
        forced_tool: only calls are allowed: the beginning of a truncated call is not text.
        custom: tools whose calls contain text instead of arguments.
        thinking: detects reasoning by its tokens, to count them; None if there can't be any.
    """

    reasoning: Callable[[], ReasoningParser] | None = None
    tools: Callable[[], ToolCallParser] | None = None
    parallel: bool = True
    shows_reasoning: bool = True
    named_tool: bool = False
    forced_tool: bool = False
    thinking: ReasoningParams | None = None
    custom: frozenset[str] = frozenset()

    @property
    def is_plain_text(self) -> bool:
        return self.reasoning is None and self.tools is None


class OutputParser:
    """Splits text into parts. The parts don't depend on how the text was cut into chunks."""

    def __init__(self, plan: OutputParserConfig) -> None:
        self._plan = plan
        self._reasoning = plan.reasoning() if plan.reasoning is not None else None
        self._tools = plan.tools() if plan.tools is not None else None
        self._custom = CustomToolCalls(plan.custom) if plan.custom else None
        self.num_calls = 0

    def push(self, text: str, *, is_final: bool = False) -> list[Part]:
        """Return the parts that are final after this text; with `is_final`, all remaining ones."""
        parts = self._split(text, is_final)
        read = list(self._read(parts))
        if is_final and self._tools is not None:
            remaining_parts = self._tools.flush()
            read += [
                part
                for part in remaining_parts
                if not (self._plan.forced_tool and part.kind == "content")
            ]
        if self._custom is not None:
            read = self._custom.push(read, is_final=is_final)
        return merge_adjacent(part for part in read if self._is_visible(part))

    def _split(self, text: str, is_final: bool) -> list[Part]:
        if self._reasoning is None:
            return [Part("content", text)]
        parts = self._reasoning.push(text)
        return parts + self._reasoning.flush() if is_final else parts

    def _read(self, parts: Iterable[Part]) -> Iterable[Part]:
        for part in parts:
            if self._tools is None:
                if part.kind == "arguments":  # of a function that wasn't offered
                    yield Part("content", part.text)
                elif part.kind != "call":
                    yield part
            elif part.kind == "content":
                yield from self._tools.push(part.text)
            else:
                yield part

    def _is_visible(self, part: Part) -> bool:
        if part.kind == "reasoning":
            return self._plan.shows_reasoning
        if part.kind in START_KINDS:
            self.num_calls = max(self.num_calls, part.call + 1)
        return self._plan.parallel or part.call == 0


@dataclass(frozen=True)
class ModelParsers:
    """The parsers of one request's model.

    Attributes:
        tools: None if the request offers no tools. functions: the offered ones.
        reasoning: None for a model without reasoning.
        preserved_token_ids: control tokens that must stay in the text.
    """

    chat: ChatRequest
    tools: type[ToolCallParser] | None
    functions: tuple[ToolFunction, ...]
    reasoning: type[ReasoningParser] | None
    preserved_token_ids: frozenset[int]

    @classmethod
    def resolve(cls, chat: ChatRequest, served: ResolvedModel) -> ModelParsers:
        """Raises `UnsupportedField` for tools that the model doesn't support."""
        functions = chat.functions_in_use
        tools = _tool_parser(chat, served) if functions else None
        reasoning = reasoning_parser(served)
        parsers = [parser for parser in (tools, reasoning) if parser is not None]
        markers = [marker for parser in parsers for marker in parser.markers]
        return cls(chat, tools, functions, reasoning, _special_token_ids(served.tokenizer, markers))

    def parser_config(
        self, inside: bool | None, thinking: ReasoningParams | None
    ) -> OutputParserConfig:
        """Configure parsing after a prompt that ends inside (or past) the reasoning."""
        reasoning = tools = None
        if self.reasoning is not None:
            reasoning = partial(self.reasoning, inside)
        if self.tools is not None:
            tools = partial(self.tools, self.functions)
        return OutputParserConfig(
            reasoning=reasoning,
            tools=tools,
            parallel=self.chat.parallel_tool_calls is not False,
            shows_reasoning=self.chat.include_reasoning is not False,
            thinking=thinking,
            named_tool=self.chat.named_function is not None,
            forced_tool=self.chat.requires_tool_call,
            custom=self.chat.custom_tools,
        )

    @property
    def call_format(self) -> ToolCallFormat:
        """Format of enforced calls. Available only with `tools`."""
        return (self.tools or JsonParser).layout

    @property
    def callable_functions(self) -> tuple[ToolFunction, ...]:
        """The functions that may be called now: the named one, or all."""
        named = self.chat.named_function
        return tuple(function for function in self.functions if named in (None, function.name))


def _tool_parser(chat: ChatRequest, served: ResolvedModel) -> type[ToolCallParser]:
    """The model's own parser. If calls are enforced any model can make them, as JSON."""
    template, configured = served.tokenizer.chat_template or "", served.info.tool_call_parser
    if configured:
        parser = tool_parsers.get(configured)
        if parser is None:
            raise _unknown_parser("tool_call_parser", configured, "tools")
        return parser
    parser = tool_parsers.for_template(template) if "tools" in template else None
    if parser is None and chat.requires_tool_call:
        return JsonParser
    if parser is None:
        raise UnsupportedField(
            f"It isn't known how the model '{served.name}' calls tools: its chat template has no "
            "tools, or calls of no known form. Name a parser by --tool-call-parser, or send "
            "tool_choice 'required'.",
            param="tools",
        )
    return parser


def reasoning_parser(served: ResolvedModel) -> type[ReasoningParser] | None:
    """The model's configured parser ("none" for none), or the one that fits its template."""
    configured = served.info.reasoning_parser
    if configured == "none":
        return None
    if not configured:
        return reasoning_parsers.for_template(served.tokenizer.chat_template or "")
    parser = reasoning_parsers.get(configured)
    if parser is None:
        raise _unknown_parser("reasoning_parser", configured, "model")
    return parser


def _unknown_parser(setting: str, name: str, param: str) -> UnsupportedField:
    return UnsupportedField(
        f"The model is set up with the {setting} {name!r}, which this gateway doesn't have.",
        param=param,
    )


def _special_token_ids(tokenizer: Tokenizer, markers: list[str]) -> frozenset[int]:
    """Ids of the markers that are special tokens, which detokenized text usually omits."""
    special = tokenizer.special_tokens
    return frozenset(tokenizer.added_token(marker).id for marker in markers if marker in special)


def build_constraint(
    chat: ChatRequest, parsers: ModelParsers, tokenizer: Tokenizer
) -> OutputConstraint:
    """The constraint on the answer's format.

    If calls are required, or a function is named, the answer consists of calls only. If the model
    chooses, calls of `strict` functions follow their schemas, and calls may replace a JSON answer.

    Raises:
        InvalidRequest: an invalid format, or two that contradict each other.
    """
    constraint = chat.constraint()
    if parsers.tools is None:
        return constraint
    if chat.requires_tool_call:
        if constraint.params is not None and constraint.source != "response_format":
            raise InvalidRequest(
                f"{constraint.source} and this tool_choice can't be used together.",
                param=constraint.source,
            )
        return _tool_call_grammar(chat, parsers, tokenizer, required=True)
    answer = _json_or_tools_schema(constraint)
    if answer is not None and not parsers.call_format.allows_text:
        raise UnsupportedField(
            "For this model, tool_choice 'auto' can't be combined with this output format.",
            param="response_format",
        )
    if answer is not None:
        return _tool_call_grammar(chat, parsers, tokenizer, required=True, answer=answer)
    strict = any(function.strict for function in parsers.functions)
    # Models remember tools from earlier turns: hiding those that aren't allowed isn't enough.
    enforces_calls = strict or (chat.has_allowed_tools and parsers.call_format.allows_text)
    if constraint.params is None and enforces_calls:
        return _tool_call_grammar(chat, parsers, tokenizer, required=False)
    return constraint


def _tool_call_grammar(
    chat: ChatRequest,
    parsers: ModelParsers,
    tokenizer: Tokenizer,
    *,
    required: bool,
    answer: dict[str, object] | None = None,
) -> OutputConstraint:
    """Calls of the offered functions in the model's format, or a JSON document (`answer`)."""
    layout = parsers.call_format
    if not required and not layout.allows_text:
        raise UnsupportedField(
            "For this model, strict functions need tool_choice 'required' or a named function.",
            param="tools",
        )
    grammar = layout.grammar(
        parsers.callable_functions,
        grammar_token_ids(tokenizer),
        parallel=chat.parallel_tool_calls is not False and chat.named_function is None,
        required=required,
        answer=answer,
    )
    names = {"structured_outputs.grammar": "tools", "structured_outputs": "tools"}
    try:
        return OutputConstraint(StructuredOutputsParams(grammar=grammar), "tools", names)
    except InvalidRequest:
        raise InvalidRequest(
            "The tools' schemas are too large to enforce.", param="tools"
        ) from None


def _json_or_tools_schema(constraint: OutputConstraint) -> dict[str, object] | None:
    """The schema of a JSON answer that calls may replace."""
    params = constraint.params
    if params is None or constraint.source != "response_format":
        return None
    schema = {"type": "object"} if params.json_object else params.json
    if not isinstance(schema, dict):
        return None
    try:
        schema = enforced_schema(schema)
    except InexactNumber as error:
        raise InvalidRequest(f"The schema's {error}.", param="response_format") from error
    return {**schema, "x-guidance": {"whitespace_pattern": JSON_WHITESPACE}}


def grammar_token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Added tokens that a grammar must refer to by id: special tokens, and tokens like tags.

    The grammar backend doesn't match these by their characters.
    """
    return {
        text: token
        for token, text in tokenizer.added_tokens.items()
        if token in tokenizer.special_token_ids or (text.startswith("<") and text.endswith(">"))
    }
