"""A Responses request as the chat that the model continues."""

from __future__ import annotations

from typing import Any

from engine.contract.errors import InvalidRequest
from inference.chat import ChatTurn
from inference.errors import as_quire_error
from inference.openai.schemas import ChatRequest
from inference.openai.serving import parse
from inference.responses.before import Said
from inference.responses.items import Messages
from inference.responses.namespaces import (
    KINDS,
    OfferedTool,
    allowed,
    as_chat_names,
    chosen,
    offered,
)
from inference.responses.schemas import LOGPROBS, ResponsesRequest
from inference.responses.truncation import without_oldest
from inference.web.known_fields import in_words_of

#: The chat's fields in this endpoint's words.
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.allowed_tools": "tool_choice",
}
#: Fields that both have under one name.
SHARED = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
    "stop",
    "user",
    "priority",
    "service_tier",
    "cache_salt",
    "chat_template_kwargs",
)


def chat_request(request: ResponsesRequest, said: Said, dropped: int = 0) -> ChatRequest:
    """The chat: instructions, what was said before, the input; the `dropped` oldest left out.

    Raises: `InvalidRequest` with the name of the client's field.
    """
    body: dict[str, Any] = {
        name: value for name in SHARED if (value := getattr(request, name)) is not None
    }
    body["messages"] = _messages(request, said)
    if dropped:
        body["messages"] = without_oldest(body["messages"], dropped)
    if request.max_output_tokens is not None:
        body["max_completion_tokens"] = request.max_output_tokens
    if request.tools:
        body["tools"] = [_tool(each) for each in offered(request.tools)]
        body["parallel_tool_calls"] = request.parallel_tool_calls
    if request.tool_choice is not None and (request.tools or request.tool_choice != "auto"):
        body["tool_choice"] = _tool_choice(request)
    if (form := _format(request)) is not None:
        body["response_format"] = form
    if request.reasoning is not None and request.reasoning.effort is not None:
        body["reasoning_effort"] = request.reasoning.effort
    if request.top_logprobs is not None or LOGPROBS in (request.include or ()):
        body |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    try:
        chat = parse(ChatRequest, body)
    except ValueError as error:  # pydantic's, in the chat's words
        told = as_quire_error(error)
        if isinstance(told, InvalidRequest):
            raise in_our_words(told, request) from None
        raise
    return chat.allowing(system_anywhere=True)


def unfollowed(turn: ChatTurn) -> list[str]:
    """Fields that the model has no use for, as this endpoint calls them."""
    return [NAMES.get(name, name) for name in turn.options.unfollowed]


def in_our_words(error: InvalidRequest, request: ResponsesRequest) -> InvalidRequest:
    """A chat's error with the field as this endpoint calls it."""

    def field(place: str, name: str) -> str:
        return f"{offered(request.tools)[int(place)].place}.{name}".rstrip(".")

    return in_words_of(error, NAMES, field)


def _messages(request: ResponsesRequest, said: Said) -> list[dict[str, Any]]:
    collected = Messages()
    collected.add_all(said.before)
    collected.add_all(said.now)
    if request.instructions is not None:
        collected.instruct(request.instructions)
    return collected.messages


def _tool(given: OfferedTool) -> dict[str, Any]:
    tool = given.tool.model_dump(exclude_none=True)
    kind = tool.pop("type")
    tool["name"] = given.name
    if given.about:  # the model sees no namespaces
        tool["description"] = f"{given.about}\n{tool.get('description', '')}".rstrip()
    form = tool.get("format")
    if kind == "custom" and isinstance(form, dict) and form.get("type") == "grammar":
        grammar = {name: value for name, value in form.items() if name != "type"}
        tool["format"] = {"type": "grammar", "grammar": grammar}
    return {"type": kind, kind: tool}


def _tool_choice(request: ResponsesRequest) -> str | dict[str, Any]:
    choice = request.tool_choice or "auto"
    if isinstance(choice, str):
        return choice
    tools = offered(request.tools)
    if choice.get("type") == "allowed_tools":
        entries: Any = choice.get("tools")
        if isinstance(entries, list):  # what is wrong stays as it is
            entries = [each for entry in entries for each in allowed(entry, tools)]
        named = {"mode": choice.get("mode"), "tools": entries}
        return {"type": "allowed_tools", "allowed_tools": named}
    kind, name = choice.get("type"), choice.get("name")
    if kind not in KINDS or not isinstance(name, str):
        raise InvalidRequest("tool_choice must name a function.", param="tool_choice")
    return as_chat_names(kind, chosen(choice, tools).name)


def _format(request: ResponsesRequest) -> dict[str, Any] | None:
    form = request.text.format if request.text else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "json_object"}
    schema = {
        "name": form.name,
        "schema": form.json_schema,
        "strict": form.strict,
        "description": form.description,
    }
    given = {name: value for name, value in schema.items() if value is not None}
    return {"type": "json_schema", "json_schema": given}
