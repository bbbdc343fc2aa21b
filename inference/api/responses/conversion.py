"""Converts a Responses request to the chat that the model continues."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from common.files import new_id
from engine.contract.errors import ContextLengthExceeded, InvalidRequest
from inference.api.responses.conversation import ConversationInput
from inference.api.responses.schemas import (
    KINDS,
    LOGPROBS,
    OfferedTool,
    ResponsesRequest,
    as_chat_names,
    flatten_tools,
    name_for_model,
    resolve_allowed_tools,
    resolve_tool_choice,
)
from inference.chat.job import prompt_token_ids
from inference.chat.turn import ChatSession
from inference.errors import UnsupportedField, as_quire_error
from inference.request.context import RequestContext
from inference.request.job import ResolvedModel
from inference.schemas.base import rename_error_field
from inference.schemas.chat import ChatRequest
from inference.serving.respond import parse

#: Parts of a message's content that are text.
TEXT_PARTS = frozenset({"input_text", "output_text", "reasoning_text", "text"})
IMAGE, FILE = "input_image", "input_file"
#: Fields of an `input_file` that a chat's document has too.
FILE_FIELDS = ("file_data", "file_url", "file_id", "filename")
PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
}
CALLS = ("function_call", "custom_tool_call")
#: Items with the output of a call.
OUTPUTS = ("function_call_output", "custom_tool_call_output")


#: Items of OpenAI's own tools in a conversation that started there. Later answers contain their
#: results, and no template supports them.
HOSTED_CALLS = frozenset(
    (
        *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
        *("mcp_list_tools", "mcp_call", "tool_search_call", "tool_search_output"),
    )
)


class Messages:
    """Collects items into chat messages. Raises `InvalidRequest` naming `input[n]`."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._reasoning = ""

    def instruct(self, text: str) -> None:
        """Add a system message before all others."""
        self.messages.insert(0, {"role": "system", "content": text})

    def add_all(self, items: Iterable[dict[str, Any]]) -> None:
        for index, item in enumerate(items):
            self._add(item, f"input[{index}]")

    def _add(self, item: dict[str, Any], param: str) -> None:
        kind = item.get("type", "message")
        if kind == "message":
            self._add_message(item, param)
        elif kind in CALLS:
            self._add_call(item, param)
        elif kind in OUTPUTS:
            output = _content(item.get("output"), f"{param}.output")
            call_id = _needed(item, "call_id", param)
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        elif kind == "reasoning":
            self._reasoning += _text(item.get("content") or "", f"{param}.content")
        elif kind not in HOSTED_CALLS:
            raise UnsupportedField(
                f"Input items of the type {str(kind)[:50]!r} are not supported.",
                param=f"{param}.type",
            )

    def _add_message(self, item: dict[str, Any], param: str) -> None:
        role = item.get("role")
        if role is None:
            raise InvalidRequest("A message needs a role.", param=f"{param}.role")
        if role == "assistant":
            self._assistant()["content"] = _text(item.get("content"), f"{param}.content")
        else:
            self._reasoning = ""
            content = _content(item.get("content"), f"{param}.content")
            self.messages.append({"role": role, "content": content})

    def _add_call(self, item: dict[str, Any], param: str) -> None:
        last = self.messages[-1] if self.messages else {}
        # Text and calls of one turn are one message, as the model generated them.
        message = last if last.get("role") == "assistant" else self._assistant()
        kind, text = "function", "arguments"
        if item["type"] == "custom_tool_call":
            kind, text = "custom", "input"
        call = {"id": _needed(item, "call_id", param), "type": kind}
        function = {name: _needed(item, name, param) for name in ("name", text)}
        function["name"] = name_for_model(item.get("namespace"), function["name"])
        message.setdefault("tool_calls", []).append({**call, kind: function})

    def _assistant(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        if self._reasoning:
            message["reasoning_content"], self._reasoning = self._reasoning, ""
        self.messages.append(message)
        return message


def _needed(item: dict[str, Any], name: str, param: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{param} needs {name}.", param=f"{param}.{name}")
    return value


def _content(content: Any, param: str) -> str | list[dict[str, Any]]:
    """A string, text parts joined, or parts as in a chat if there are media among them."""
    media = (IMAGE, FILE)
    if not isinstance(content, list) or not any(part.get("type") in media for part in content):
        return _text(content, param)
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        if part.get("type") == FILE:
            file = {name: part[name] for name in FILE_FIELDS if part.get(name) is not None}
            parts.append({"type": "file", "file": file})
            continue
        if part.get("type") != IMAGE:
            parts.append({"type": "text", "text": _text([part], param)})
            continue
        source = {
            name: part[name] for name in ("image_url", "file_id") if part.get(name) is not None
        }
        if len(source) != 1 or not all(isinstance(value, str) for value in source.values()):
            raise InvalidRequest(
                "An image needs an image_url or a file_id.", param=f"{param}[{index}].image_url"
            )
        parts.append({"type": IMAGE, **source})
    return parts


def _text(content: Any, param: str) -> str:
    """A string, or text parts joined. Raises `UnsupportedField` for others."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest("There is no content.", param=param)
    texts = []
    for index, part in enumerate(content):
        kind, text = part.get("type"), part.get("text")
        if kind == "refusal":
            text = part.get("refusal")
        elif not isinstance(kind, str) or kind not in TEXT_PARTS:
            raise UnsupportedField(
                f"Content of the type {str(kind)[:50]!r} is not supported.",
                param=f"{param}[{index}].type",
            )
        if not isinstance(text, str):
            raise InvalidRequest("A text part needs a text.", param=f"{param}[{index}].text")
        texts.append(text)
    return "".join(texts)


def to_stored_items(items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Input items as they are listed later: each with an id, content always as parts."""
    stored = []
    for item in items:
        kind = item.get("type", "message")
        stored_item = {"id": new_id(PREFIXES.get(kind, "item_")), "status": "completed", **item}
        stored_item["type"] = kind
        if kind == "message" and isinstance(item.get("content"), str):
            part = "output_text" if item.get("role") == "assistant" else "input_text"
            stored_item["content"] = [{"type": part, "text": item["content"]}]
            if part == "output_text":
                stored_item["content"][0]["annotations"] = []
        stored.append(stored_item)
    return stored


SYSTEM = ("system", "developer")


def drop_oldest_messages(messages: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Drop the `count` oldest messages that aren't the system's; the last one always stays.

    Outputs of dropped calls are dropped too.
    """
    spoken = [index for index, message in enumerate(messages) if message["role"] not in SYSTEM]
    dropped = set(spoken[:-1][:count])
    remaining = [message for index, message in enumerate(messages) if index not in dropped]
    calls = {call["id"] for message in remaining for call in message.get("tool_calls") or ()}
    return [
        m
        for m in remaining
        if m["role"] != "tool" or m["tool_call_id"] in calls or m is remaining[-1]
    ]


async def truncate_to_context(
    build_chat: Callable[[int], ChatRequest], served: ResolvedModel, ctx: RequestContext
) -> ChatRequest:
    """Drop as few of the chat's oldest messages as necessary; all but one if it still doesn't fit.

    Args:
        build_chat: builds the chat without the given number of messages.
    """

    async def fits(count: int) -> bool:
        chat = await ctx.offload(build_chat, count)
        try:
            prompt = await prompt_token_ids(chat, served, ctx, generates=True)
        except ContextLengthExceeded:
            return False
        # The limit is a maximum: one as large as the context must not drop the whole conversation.
        num_output_tokens = min(chat.output_limit or 1, served.info.max_model_len // 2)
        return len(prompt) + num_output_tokens <= served.info.max_model_len

    if await fits(0):
        return await ctx.offload(build_chat, 0)
    low, high = 0, len((await ctx.offload(build_chat, 0)).messages)  # low doesn't fit; high may
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if await fits(middle) else (middle, high)
    return await ctx.offload(build_chat, high)


#: Names of the chat's fields in this endpoint.
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.allowed_tools": "tool_choice",
}
#: Fields of both endpoints that aren't passed on as they are.
_CONVERTED = {
    *("metadata", "parallel_tool_calls", "store", "stream_options"),
    *("tool_choice", "tools", "top_logprobs"),
}
#: Fields with the same name and meaning in both.
SHARED = [
    name
    for name in ResponsesRequest.model_fields
    if name in ChatRequest.model_fields and name not in _CONVERTED
]


def chat_from_responses(
    request: ResponsesRequest, conversation: ConversationInput, dropped: int = 0
) -> ChatRequest:
    """Build the chat: instructions, earlier items, the input, minus the `dropped` oldest messages.

    Raises: `InvalidRequest` with the name of the client's field.
    """
    body: dict[str, Any] = {
        name: value for name in SHARED if (value := getattr(request, name)) is not None
    }
    body["messages"] = _messages(request, conversation)
    if dropped:
        body["messages"] = drop_oldest_messages(body["messages"], dropped)
    if request.max_output_tokens is not None:
        body["max_completion_tokens"] = request.max_output_tokens
    if request.tools:
        body["tools"] = [_tool(tool) for tool in flatten_tools(request.tools)]
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
    except ValueError as error:  # from pydantic, with the chat's field names
        reported = as_quire_error(error)
        if isinstance(reported, InvalidRequest):
            raise rename_to_responses_fields(reported, request) from None
        raise
    return chat.with_leniency(system_anywhere=True)


def unsupported_fields(turn: ChatSession) -> list[str]:
    """Fields that the model doesn't support, by this endpoint's names."""
    return [NAMES.get(name, name) for name in turn.options.unsupported_fields]


def rename_to_responses_fields(error: InvalidRequest, request: ResponsesRequest) -> InvalidRequest:
    """A chat's error with this endpoint's field name."""

    def field(index: str, name: str) -> str:
        return f"{flatten_tools(request.tools)[int(index)].template_name}.{name}".rstrip(".")

    return rename_error_field(error, NAMES, field)


def _messages(request: ResponsesRequest, conversation: ConversationInput) -> list[dict[str, Any]]:
    collected = Messages()
    collected.add_all(conversation.history)
    collected.add_all(conversation.new_items)
    if request.instructions is not None:
        collected.instruct(request.instructions)
    return collected.messages


def _tool(offered: OfferedTool) -> dict[str, Any]:
    tool = offered.tool.model_dump(exclude_none=True)
    kind = tool.pop("type")
    tool["name"] = offered.name
    if offered.description:  # the model sees no namespaces
        tool["description"] = f"{offered.description}\n{tool.get('description', '')}".rstrip()
    form = tool.get("format")
    if kind == "custom" and isinstance(form, dict) and form.get("type") == "grammar":
        grammar = {name: value for name, value in form.items() if name != "type"}
        tool["format"] = {"type": "grammar", "grammar": grammar}
    return {"type": kind, kind: tool}


def _tool_choice(request: ResponsesRequest) -> str | dict[str, Any]:
    choice = request.tool_choice or "auto"
    if isinstance(choice, str):
        return choice
    tools = flatten_tools(request.tools)
    if choice.get("type") == "allowed_tools":
        entries: Any = choice.get("tools")
        if isinstance(entries, list):  # invalid entries stay unchanged
            entries = [tool for entry in entries for tool in resolve_allowed_tools(entry, tools)]
        named = {"mode": choice.get("mode"), "tools": entries}
        return {"type": "allowed_tools", "allowed_tools": named}
    kind, name = choice.get("type"), choice.get("name")
    if kind not in KINDS or not isinstance(name, str):
        raise InvalidRequest("tool_choice must name a function.", param="tool_choice")
    return as_chat_names(kind, resolve_tool_choice(choice, tools).name)


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
    fields = {name: value for name, value in schema.items() if value is not None}
    return {"type": "json_schema", "json_schema": fields}
