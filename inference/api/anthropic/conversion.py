"""Converts an Anthropic conversation to the chat that the model continues."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from engine.contract.errors import InvalidRequest
from inference.api.anthropic.schemas import (
    REDACTED,
    Block,
    CountTokensRequest,
    MessagesRequest,
    ToolChoice,
)
from inference.chat.turn import ChatSession
from inference.errors import UnsupportedField, as_quire_error, describe_validation_error
from inference.schemas.base import rename_error_field
from inference.schemas.chat import ChatRequest
from inference.serving.respond import parse

#: Names of the chat's fields in this endpoint.
NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "user": "metadata.user_id",
}
SHARED = ("temperature", "top_p", "top_k", "stream", "priority", "cache_salt")
#: Start of a line in Claude Code's system prompt that is meant for the server. It differs in every
#: request, so that nothing after it would be found in the prefix cache.
BILLING = "x-anthropic-billing-header:"
#: Fields of a source that a chat's document supports, by the source's type.
FILE_FIELDS = {
    "base64": ("data", "file_data"),
    "url": ("url", "file_url"),
    "file": ("file_id",) * 2,
}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_from_messages(request: CountTokensRequest) -> ChatRequest:
    """Build the chat. Raises: `InvalidRequest` with the name of the client's field."""
    body = _without_none(model=request.model, messages=_messages(request))
    last = body["messages"][-1]
    if last["role"] == "assistant":
        if last.get("tool_calls"):
            raise InvalidRequest("The last message can't be a tool use.", param="messages")
        body["continue_final_message"] = True
    if isinstance(request, MessagesRequest):
        body |= _without_none(
            max_completion_tokens=request.max_tokens,
            stop=request.stop_sequences or None,
            user=request.metadata.user_id if request.metadata else None,
            **{name: getattr(request, name) for name in SHARED},
        )
    if request.tools:
        body["tools"] = [
            {
                "type": "function",
                "function": _without_none(
                    name=tool.name,
                    description=tool.description,
                    parameters=tool.input_schema,
                    strict=tool.strict,
                ),
            }
            for tool in request.tools
            if not tool.is_hosted
        ]
    if request.tool_choice is not None:
        body |= _tool_choice(request.tool_choice, bool(request.tools))
    body |= _thinking(request)
    try:
        return parse(ChatRequest, body).with_leniency(any_limit=True, system_anywhere=True)
    except ValueError as error:  # from pydantic, with the chat's field names
        reported = as_quire_error(error)
        if isinstance(reported, InvalidRequest):
            raise rename_to_messages_fields(reported) from None
        raise


def rename_to_messages_fields(error: InvalidRequest) -> InvalidRequest:
    """A chat's error with this endpoint's field name."""
    return rename_error_field(error, NAMES, _tool_field)


def unsupported_fields(turn: ChatSession) -> list[str]:
    """Fields that the model doesn't support, by this endpoint's names."""
    return [NAMES.get(name, name) for name in turn.options.unsupported_fields]


def _tool_field(index: str, name: str) -> str:
    name = {"parameters": "input_schema"}.get(name, name)
    return f"tools.{index}.{name}".rstrip(".")


def _without_none(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _tool_choice(choice: ToolChoice, has_tools: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    if choice.type == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif has_tools or choice.type == "any":
        fields["tool_choice"] = CHOICES[choice.type]
    return fields


def _thinking(request: CountTokensRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    thinking = request.thinking
    if thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": thinking.type != "disabled"}
        if thinking.type == "enabled" and thinking.budget_tokens is not None:
            fields["thinking_token_budget"] = thinking.budget_tokens
    if request.effort is not None:
        fields["reasoning_effort"] = request.effort
    if request.form is not None:
        schema = {"name": "answer", "schema": request.form.json_schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _messages(request: CountTokensRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.system and (system := _system(request.system)):
        messages.append({"role": "system", "content": system})
    for index, message in enumerate(request.messages):
        content = message.content
        blocks = [Block(type="text", text=content)] if isinstance(content, str) else content
        ADD[message.role](messages, blocks, f"messages.{index}.content")
    return messages


def _append(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Add a message, or merge it with the previous one of the same role."""
    last = messages[-1] if messages else {}
    if last.get("role") != message["role"]:
        messages.append(message)
        return
    if isinstance(last["content"], list) or isinstance(message["content"], list):
        last["content"] = _parts(last["content"]) + _parts(message["content"])
    else:
        last["content"] = "\n".join(filter(None, (last["content"], message["content"])))
    if "tool_calls" in message:
        last.setdefault("tool_calls", []).extend(message["tool_calls"])
    if "reasoning_content" in message:
        last["reasoning_content"] = last.get("reasoning_content", "") + message["reasoning_content"]


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _image(block: Block, param: str) -> dict[str, Any]:
    """An image as a part of a chat."""
    source = block.source if isinstance(block.source, dict) else {}
    kind = source.get("type")
    if kind == "base64":
        media_type = _needed(source.get("media_type"), f"{param}.source.media_type")
        data = _needed(source.get("data"), f"{param}.source.data")
        return {"type": "image_url", "image_url": f"data:{media_type};base64,{data}"}
    if kind == "url":
        return {"type": "image_url", "image_url": _needed(source.get("url"), f"{param}.source.url")}
    if kind == "file":
        return {
            "type": "image_url",
            "file_id": _needed(source.get("file_id"), f"{param}.source.file_id"),
        }
    raise UnsupportedField(
        "Only images whose source is of the type 'base64', 'url' or 'file' are supported.",
        param=f"{param}.source.type",
    )


def _parts_of(block: Block, param: str) -> list[dict[str, Any]]:
    """A block of text or media as parts of a chat."""
    source = block.source if isinstance(block.source, dict) else {}
    if block.type == "image":
        return [_image(block, param)]
    fields = FILE_FIELDS.get(str(source.get("type")))
    if block.type != "document" or fields is None:
        return [{"type": "text", "text": _text(block, param)}]
    name, field = fields
    file = {field: _needed(source.get(name), f"{param}.source.{name}")}
    if block.title:
        file["filename"] = block.title
    context = [{"type": "text", "text": block.context}] if block.context else []
    return [*context, {"type": "file", "file": file}]


def _system(system: str | list[Block]) -> str:
    if isinstance(system, str):
        return _without_billing(system)
    texts = [_text(block, f"system.{index}") for index, block in enumerate(system)]
    return "\n".join(filter(None, map(_without_billing, texts)))


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING) else text


def _add_user(messages: list[dict[str, Any]], blocks: list[Block], param: str) -> None:
    """Add tool results as separate messages, before the user's text."""
    parts: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        block_param = f"{param}.{index}"
        if block.type == "tool_result":
            call_id = _needed(block.tool_use_id, f"{block_param}.tool_use_id")
            content = _result(block, block_param)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        else:
            parts += _parts_of(block, block_param)
    if any(part["type"] != "text" for part in parts):
        _append(messages, {"role": "user", "content": parts})
    elif parts or not blocks:
        content = "\n".join(part["text"] for part in parts)
        _append(messages, {"role": "user", "content": content})


def _result(block: Block, param: str) -> str | list[dict[str, Any]]:
    """A tool's result: text, or parts if there are media in it."""
    content = block.content
    parts: list[dict[str, Any]] = []
    if isinstance(content, list):
        for index, part in enumerate(content):
            part_param = f"{param}.content.{index}"
            parts += _parts_of(_part(part, part_param), part_param)
    elif content:
        parts.append({"type": "text", "text": content})
    prefix = "Error: " if block.is_error else ""
    if any(part["type"] != "text" for part in parts):
        return [{"type": "text", "text": prefix}, *parts] if prefix else parts
    return prefix + "\n".join(part["text"] for part in parts)


def _part(part: dict[str, Any], param: str) -> Block:
    try:
        return Block.model_validate(part)
    except ValidationError as error:
        description = describe_validation_error(error)
        raise InvalidRequest(
            description["message"], param=f"{param}.{description['param']}"
        ) from None


def _add_assistant(messages: list[dict[str, Any]], blocks: list[Block], param: str) -> None:
    texts: list[str] = []
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for index, block in enumerate(blocks):
        block_param = f"{param}.{index}"
        if block.type == "tool_use":
            function = {
                "name": _needed(block.name, f"{block_param}.name"),
                "arguments": json.dumps(block.input or {}, ensure_ascii=False),
            }
            call = {"id": _needed(block.id, f"{block_param}.id"), "type": "function"}
            message.setdefault("tool_calls", []).append(call | {"function": function})
        elif block.type == REDACTED:
            continue
        elif block.type == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + (
                block.thinking or ""
            )
        else:
            texts.append(_text(block, block_param))
    message["content"] = "".join(texts)
    _append(messages, message)


def _add_system(messages: list[dict[str, Any]], blocks: list[Block], param: str) -> None:
    texts = [_text(block, f"{param}.{index}") for index, block in enumerate(blocks)]
    _append(messages, {"role": "system", "content": "\n".join(texts)})


ADD = {"assistant": _add_assistant, "system": _add_system, "user": _add_user}


def _search_result(block: Block, param: str) -> str:
    """A search result: its title, source and text."""
    content = block.content if isinstance(block.content, list) else []
    texts = [
        _text(_part(part, f"{param}.content.{index}"), f"{param}.content.{index}")
        for index, part in enumerate(content)
    ]
    source = block.source if isinstance(block.source, str) else None
    return "\n".join(filter(None, (block.title, source, *texts)))


def _document(block: Block, param: str) -> str:
    """A text document: its title, context and text."""
    source = block.source if isinstance(block.source, dict) else {}
    kind, text = source.get("type"), source.get("data")
    if kind == "content":
        text = source.get("content")
        if isinstance(text, list):
            content_param = f"{param}.source.content"
            parts = [
                _part(part if isinstance(part, dict) else {}, f"{content_param}.{index}")
                for index, part in enumerate(text)
            ]
            text = "\n".join(_text(part, f"{content_param}.{k}") for k, part in enumerate(parts))
    elif kind != "text":
        raise UnsupportedField(
            "A document needs a source of the type 'base64', 'url', 'file', 'text' or 'content' "
            "(in the system prompt 'text' or 'content').",
            param=f"{param}.source.type",
        )
    if not isinstance(text, str):
        raise InvalidRequest("A document needs its text.", param=f"{param}.source")
    return "\n".join(filter(None, (block.title, block.context, text)))


def _text(block: Block, param: str) -> str:
    if block.type == "document":
        return _document(block, param)
    if block.type == "search_result":
        return _search_result(block, param)
    if block.type == "tool_reference":  # returned by Claude Code's tool search
        return f"Tool available: {_needed(block.tool_name, f'{param}.tool_name')}"
    if block.type != "text":
        raise UnsupportedField(
            f"Blocks of the type {block.type[:50]!r} are not supported.",
            param=f"{param}.type",
        )
    return _needed(block.text, f"{param}.text")


def _needed(value: str | None, param: str) -> str:
    if value is None:
        raise InvalidRequest("Field required.", param=param)
    return value
