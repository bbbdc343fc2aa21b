"""Chat messages, as far as they can be checked without the model."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from inference.web.fails_fast import FailsFast

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
#: Parts that are text, and the field that holds it. The Responses API's names are taken too.
TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}


class ContentPart(BaseModel):
    """A part of a message's content. Only text is taken."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _text_only(self) -> Self:
        field = TEXT_PARTS.get(self.type)
        if field is None:
            raise ValueError(f"content parts of type '{self.type[:50]}' are not supported.")
        if getattr(self, field) is None:
            raise ValueError(f"a part of type '{self.type}' needs a {field}.")
        return self


class CalledFunction(BaseModel):
    """A call's function: its name, and its arguments as JSON text."""

    model_config = ConfigDict(strict=True)

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call that the assistant made earlier."""

    model_config = ConfigDict(strict=True, extra="allow")

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class CalledCustom(BaseModel):
    """A call's custom tool: its name, and the text that it got."""

    model_config = ConfigDict(strict=True)

    name: str
    input: str


class CustomCall(BaseModel):
    """A call of a custom tool that the assistant made earlier."""

    model_config = ConfigDict(strict=True, extra="allow")

    id: str | None = None
    type: Literal["custom"]
    custom: CalledCustom


class Message(FailsFast):
    """One message of a chat. Fields beyond these reach the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Role
    content: str | list[str | ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall | CustomCall] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        """Content may be null, which is none; only a call stands without any."""
        called = self.role == "assistant" and (self.tool_calls or self.function_call)
        if "content" not in self.model_fields_set and not called:
            raise ValueError(f"a message of role '{self.role}' needs content.")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a message of role 'tool' needs a tool_call_id.")
        if self.role == "function" and self.name is None:
            raise ValueError("a message of role 'function' needs a name.")
        return self


Messages = Annotated[list[Message], Field(min_length=1)]
