"""The bodies of `POST /v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from engine.contract.errors import InvalidRequest
from inference.errors import UnsupportedField
from inference.schemas.base import (
    TEMPLATE_FIELDS,
    FailFastModel,
    ModelName,
    Priority,
    ShortText,
    StrictModel,
    StrictRequest,
)
from inference.schemas.chat import Effort
from inference.schemas.tools import MAX_TOOLS

#: Known but unsupported fields, with the values that have no effect.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **TEMPLATE_FIELDS,
    "container": (),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
}


#: Tools that Anthropic's servers run. Agents send them along with their own, which are offered.
_HOSTED = re.compile(
    r"(advisor|code_execution|memory|tool_search_tool_\w+|web_fetch|web_search)_\d{8}"
)
#: Encrypted reasoning that only its author can read.
REDACTED = "redacted_thinking"


class Block(BaseModel):
    """One block of a message's content. The required fields depend on its type."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Annotated[str, StringConstraints(max_length=100)] = Field(
        description="Kind of block, such as `text`, `image`, `tool_use` or `tool_result`."
    )
    text: str | None = Field(default=None, description="Text of a text block.")
    thinking: str | None = Field(default=None, description="Text of a thinking block.")
    id: str | None = Field(default=None, description="Identifier of a tool call.")
    name: str | None = Field(default=None, description="Name of the called tool.")
    input: dict[str, Any] | None = Field(default=None, description="Arguments of the call.")
    tool_use_id: str | None = None
    content: str | list[dict[str, Any]] | None = Field(
        default=None, description="Result of a tool, as text or blocks."
    )
    is_error: bool | None = None
    tool_name: str | None = Field(
        default=None, description="Name of the tool that a `tool_reference` block names."
    )
    source: dict[str, Any] | str | None = None
    title: str | None = None
    context: str | None = None
    citations: dict[str, Any] | None = None


class InputMessage(FailFastModel):
    """One message of the conversation."""

    model_config = ConfigDict(strict=True, extra="forbid")

    role: Literal["user", "assistant", "system"] = Field(description="Author of the message.")
    content: str | list[Block] = Field(description="Text, or a list of blocks.")


class AnthropicTool(BaseModel):
    """A tool that the client runs."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str | None = Field(
        default="custom", description="`custom`, or nothing: other tools would run at Anthropic."
    )
    name: str = Field(description="Name by which the model calls the tool.")
    description: str | None = Field(default=None, description="What the tool does, for the model.")
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def is_hosted(self) -> bool:
        """Whether Anthropic's servers would run it (`web_search_20250305`)."""
        return _HOSTED.fullmatch(self.type or "") is not None


class ToolChoice(StrictModel):
    """Which tool the model has to use."""

    type: Literal["auto", "any", "tool", "none"] = Field(
        description="Whether the model may call tools, must call one, or must call the named one."
    )
    name: str | None = Field(default=None, description="Name of the tool to call, with `tool`.")
    disable_parallel_tool_use: bool | None = None


class Thinking(StrictModel):
    """Whether the model reasons first, and for how long."""

    type: Literal["enabled", "disabled", "adaptive"] = Field(
        description="Whether the model thinks first."
    )
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(BaseModel):
    """A JSON schema for the answer."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    type: Literal["json_schema"] = Field(description="Always `json_schema`.")
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    """Required form of the answer."""

    effort: str | None = None
    format: OutputFormat | None = Field(
        default=None, description="JSON schema that the answer follows."
    )


class Metadata(StrictModel):
    """About the request."""

    user_id: ShortText | None = None


class CountTokensRequest(StrictRequest):
    """A conversation. Sampling fields beyond Anthropic's are in `MessagesRequest`."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = UNSUPPORTED

    model: ModelName | None = None
    messages: Annotated[list[InputMessage], Field(min_length=1)]
    system: str | list[Block] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = Field(
        default=None, description="Whether the model thinks first, and for how long."
    )
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: dict[str, Any] | None = None

    def check(self) -> None:
        """Tools and their choice."""
        has_client_tools = any(not tool.is_hosted for tool in self.tools or ())
        for index, tool in enumerate(self.tools or ()):
            if has_client_tools and tool.is_hosted:
                continue
            if tool.type not in (None, "custom"):
                raise UnsupportedField(
                    f"Tools of the type {tool.type[:50]!r} are not supported.",
                    param=f"tools.{index}.type",
                )
            if tool.input_schema is None:
                raise InvalidRequest(
                    "A tool needs an input_schema.", param=f"tools.{index}.input_schema"
                )
        self._check_choice()
        self._check_roles()
        configured = self.output_config.format if self.output_config else None
        # The beta's name of output_config.format.
        if self.output_format is not None and configured is not None:
            raise InvalidRequest(
                "output_format and output_config.format can't be used together.",
                param="output_format",
            )

    def _check_roles(self) -> None:
        if all(message.role == "system" for message in self.messages):
            raise InvalidRequest("messages must not be empty.", param="messages")

    def ignored_fields(self) -> list[str]:
        """Includes content that another service encrypted for itself, and unknown efforts."""
        names = super().ignored_fields()
        if self.output_config is not None and self.effort != self.output_config.effort:
            names.append("output_config.effort")
        names += [f"tools.{n}" for n, tool in enumerate(self.tools or ()) if tool.is_hosted]
        for index, message in enumerate(self.messages):
            if not isinstance(message.content, str):
                for number, block in enumerate(message.content):
                    param = f"messages.{index}.content.{number}"
                    if block.type == REDACTED:
                        names.append(param)
                    if block.citations and block.citations.get("enabled"):
                        names.append(f"{param}.citations")
        return names

    @property
    def effort(self) -> str | None:
        """Reasoning effort by the chat endpoint's names."""
        effort = self.output_config.effort if self.output_config else None
        return effort if effort in get_args(Effort) else None

    def _check_choice(self) -> None:
        choice = self.tool_choice
        if choice is None or choice.type != "tool":
            return
        if choice.name is None:
            raise InvalidRequest("The choice of a tool needs its name.", param="tool_choice.name")
        if choice.name not in [tool.name for tool in self.tools or ()]:
            raise InvalidRequest(
                f"Tool {choice.name[:100]!r} not found in tools.", param="tool_choice.name"
            )

    @property
    def form(self) -> OutputFormat | None:
        """The answer's format, under either of its names."""
        configured = self.output_config.format if self.output_config else None
        return configured or self.output_format


class MessagesRequest(CountTokensRequest):
    """Body of a Messages request."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    metadata: Metadata | None = None
    priority: Priority | None = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
