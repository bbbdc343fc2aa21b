"""Chat messages and tools, as far as they can be checked without the model."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from inference.web.fails_fast import FailsFast

TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
MAX_TOOLS = 128

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


class Message(FailsFast):
    """One message of a chat. Fields beyond these reach the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Role
    content: str | list[str | ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
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


class FunctionDefinition(BaseModel):
    """A function that the model may call. `parameters` is a JSON schema."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not TOOL_NAME.fullmatch(name):
            raise ValueError("must be 1 to 64 letters, digits, '_', '-' or '.'.")
        return name

    @field_validator("parameters")
    @classmethod
    def _of_an_object(cls, parameters: dict[str, Any] | None) -> dict[str, Any] | None:
        if parameters is not None and parameters.get("type", "object") != "object":
            raise ValueError("must be the schema of an object.")
        return parameters


class Tool(BaseModel):
    """A tool; only functions are there."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: FunctionDefinition


Messages = Annotated[list[Message], Field(min_length=1)]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]
