"""What a chat's answer must look like: by its own fields, and by the tools it offers."""

from __future__ import annotations

import json

from engine.contract.errors import InvalidRequest
from engine.contract.json_schema import close_objects
from engine.contract.structured_outputs import JSON_WHITESPACE, StructuredOutputsParams
from engine.text import Tokenizer
from inference.chat.parsers import ModelParsers
from inference.errors import UnsupportedField
from inference.openai.schemas import ChatRequest
from inference.openai.schemas.structured import Constraint


def chat_constraint(chat: ChatRequest, parsers: ModelParsers, tokenizer: Tokenizer) -> Constraint:
    """The form of the answer.

    Where calls are required, or a function is named, the answer is calls alone. Where the model
    chooses, calls of `strict` functions follow their schemas, and calls may come instead of JSON.

    Raises:
        InvalidRequest: a bad form, or two that contradict each other.
    """
    given = chat.constraint()
    if parsers.tools is None:
        return given
    if chat.forces_calls:
        if given.params is not None and given.source != "response_format":
            raise InvalidRequest(
                f"{given.source} and this tool_choice can't be used together.", param=given.source
            )
        return _calls(chat, parsers, tokenizer, required=True)
    answer = _answer_schema(given)
    if answer is not None and not parsers.layout.free:
        raise UnsupportedField(
            "For this model, tool_choice 'auto' can't be combined with this output format.",
            param="response_format",
        )
    if answer is not None:
        return _calls(chat, parsers, tokenizer, required=True, answer=answer)
    strict = any(function.strict for function in parsers.functions)
    # Models remember tools from earlier turns: hiding those that aren't allowed isn't enough.
    held = strict or (chat.limits_tools and parsers.layout.free)
    if given.params is None and held:
        return _calls(chat, parsers, tokenizer, required=False)
    return given


def _calls(
    chat: ChatRequest,
    parsers: ModelParsers,
    tokenizer: Tokenizer,
    *,
    required: bool,
    answer: dict[str, object] | None = None,
) -> Constraint:
    """Calls of the offered functions in the model's own way; or a JSON document (`answer`)."""
    layout = parsers.layout
    if not required and not layout.free:
        raise UnsupportedField(
            "For this model, strict functions need tool_choice 'required' or a named function.",
            param="tools",
        )
    grammar = layout.grammar(
        parsers.callable_functions,
        grammar_tokens(tokenizer),
        parallel=chat.parallel_tool_calls is not False and chat.named_function is None,
        required=required,
        answer=answer,
    )
    names = {"structured_outputs.grammar": "tools", "structured_outputs": "tools"}
    try:
        return Constraint(StructuredOutputsParams(grammar=grammar), "tools", names)
    except InvalidRequest:
        raise InvalidRequest(
            "The tools' schemas are too large to enforce.", param="tools"
        ) from None


def _answer_schema(given: Constraint) -> dict[str, object] | None:
    """The schema of a JSON answer that may take turns with calls."""
    params = given.params
    if params is None or given.source != "response_format":
        return None
    schema = {"type": "object"} if params.json_object else params.json
    if not isinstance(schema, dict):
        return None
    own = json.loads(json.dumps(schema))
    if params.disable_additional_properties:
        close_objects(own)
    return {**own, "x-guidance": {"whitespace_pattern": JSON_WHITESPACE}}


def grammar_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Added tokens that a grammar must name by id: special ones, and any that look like tags.

    The grammar backend reads those two kinds apart from their characters.
    """
    return {
        text: token
        for token, text in tokenizer.added_tokens.items()
        if token in tokenizer.special_token_ids or (text.startswith("<") and text.endswith(">"))
    }
