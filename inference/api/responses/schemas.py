"""The body of `POST /v1/responses`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from engine.contract.errors import InvalidRequest
from inference.errors import UnsupportedField
from inference.schemas.base import (
    BatchMetadata,
    FailFastModel,
    ModelName,
    Priority,
    ShortText,
    StrictModel,
    StrictRequest,
    Tier,
)
from inference.schemas.chat import Effort
from inference.schemas.tools import MAX_TOOLS

_SEPARATOR = "__"
KINDS = ("function", "custom")
#: Tools that OpenAI's servers run. Agents send them along with their own, which alone are offered.
HOSTED = frozenset(
    (
        *("web_search", "web_search_preview", "file_search", "code_interpreter", "mcp"),
        *("image_generation", "computer_use_preview", "local_shell", "shell", "tool_search"),
        "apply_patch",
    )
)


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that the model is offered.

    Attributes:
        name: for the model; `short_name`: the client's name for it, without the namespace.
        namespace: "" for none. description: the namespace's description.
        template_name: the tool's name in the request's fields, for errors.
    """

    tool: NamespacedTool
    name: str
    short_name: str
    template_name: str
    namespace: str = ""
    description: str = ""


def name_for_model(namespace: str | None, name: str) -> str:
    """The name under which the model sees a tool."""
    return f"{namespace}{_SEPARATOR}{name}" if namespace else name


def flatten_tools(tools: list[ResponsesTool] | None) -> list[OfferedTool]:
    """All tools in order, including those in namespaces."""
    offered = []
    for index, tool in enumerate(tools or ()):
        field, name = f"tools[{index}]", tool.name or ""
        if is_hosted(tool):
            continue
        if tool.type != "namespace":
            offered.append(OfferedTool(tool, name, name, field))
            continue
        for inner, inner_tool in enumerate(tool.tools or ()):
            short_name = inner_tool.name or ""
            flat, within = name_for_model(name, short_name), f"{field}.tools[{inner}]"
            offered.append(
                OfferedTool(inner_tool, flat, short_name, within, name, tool.description or "")
            )
    return offered


def split_names(tools: list[ResponsesTool] | None) -> dict[str, tuple[str, str]]:
    """Namespace and short name of each tool in a namespace, by its name for the model."""
    return {
        tool.name: (tool.namespace, tool.short_name)
        for tool in flatten_tools(tools)
        if tool.namespace
    }


def is_hosted(tool: ResponsesTool) -> bool:
    """Whether OpenAI's servers would run the tool; its type may end in a date."""
    return re.sub(r"_\d{4}_\d{2}_\d{2}$", "", tool.type) in HOSTED


def check_tools(tools: list[ResponsesTool] | None) -> None:
    """Raise `InvalidRequest` for an invalid tool, or if all are hosted ones."""
    has_client_tools = any(not is_hosted(tool) for tool in tools or ())
    for index, tool in enumerate(tools or ()):
        field = f"tools[{index}]"
        if has_client_tools and is_hosted(tool):
            continue
        if tool.type != "namespace":
            _check(tool, field)
            continue
        if not tool.name:
            raise InvalidRequest("A namespace needs a name.", param=f"{field}.name")
        if not tool.tools:
            raise InvalidRequest("A namespace needs tools.", param=f"{field}.tools")
        for inner, inner_tool in enumerate(tool.tools):
            _check(inner_tool, f"{field}.tools[{inner}]")


def _check(tool: NamespacedTool, field: str) -> None:
    if tool.type not in KINDS:
        raise UnsupportedField(
            f"Tools of the type {tool.type[:50]!r} are not supported.", param=f"{field}.type"
        )
    if tool.name is None:
        raise InvalidRequest("A tool needs a name.", param=f"{field}.name")


def resolve_tool_choice(choice: Mapping[str, Any], tools: list[OfferedTool]) -> OfferedTool:
    """The tool that `{"type": ..., "name": ...}` refers to, optionally with a `namespace`.

    Raises `InvalidRequest` if there is none, or one in several namespaces.
    """
    kind, name, namespace = choice.get("type"), choice.get("name"), choice.get("namespace")
    what = "function" if kind == "function" else "custom tool"
    candidates = [tool for tool in tools if tool.tool.type == kind]
    if namespace is not None:
        candidates = [tool for tool in candidates if tool.namespace == namespace]
    matches = [tool for tool in candidates if tool.name == name] or [
        tool for tool in candidates if tool.short_name == name
    ]
    if not matches:
        raise InvalidRequest(
            f"{what.capitalize()} {str(name)[:100]!r} not found in tools.", param="tool_choice"
        )
    if len(matches) > 1:
        names = " or ".join(tool.name for tool in matches[:5])
        raise InvalidRequest(
            f"Several namespaces have a {what} {str(name)[:100]!r}: name it as {names}.",
            param="tool_choice",
        )
    return matches[0]


def resolve_allowed_tools(entry: Any, tools: list[OfferedTool]) -> list[dict[str, Any]]:
    """The tools that an entry of `allowed_tools` refers to, in the chat's form: one, or all of a
    namespace.

    An entry without a match is returned unchanged, to be rejected by the chat's validation.
    """
    if not isinstance(entry, dict):
        return [{}]
    if entry.get("type") == "namespace":
        members = [tool for tool in tools if tool.namespace and tool.namespace == entry.get("name")]
        return [as_chat_names(tool.tool.type, tool.name) for tool in members] or [{}]
    kind = str(entry.get("type"))
    try:
        return [as_chat_names(kind, resolve_tool_choice(entry, tools).name)]
    except InvalidRequest:
        return [as_chat_names(kind, entry.get("name"))]


def as_chat_names(kind: str, name: Any) -> dict[str, Any]:
    """Tool choice in the chat endpoint's form."""
    return {"type": kind, kind: {"name": name}}


#: Known but unsupported fields, with the values that have no effect.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "access_programs": (),
    "chat_template": (),
    "extra_body": ({},),
    "image": (),
    "moderation": (),
    "prompt": (),
}
LOGPROBS = "message.output_text.logprobs"
#: Values of `include` without effect: about unsupported tools, and about reasoning, which is in its
#: item as plain text and returned by clients unchanged.
INCLUDABLE = frozenset(
    {
        LOGPROBS,
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)


class InputItem(FailFastModel):
    """One item of the input. The required fields depend on its type."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Annotated[str, StringConstraints(max_length=100)] = Field(
        default="message", description="Kind of item, such as `message` or `function_call_output`."
    )
    role: Literal["user", "assistant", "system", "developer"] | None = Field(
        default=None, description="Author of a message."
    )
    content: str | list[dict[str, Any]] | None = Field(
        default=None, description="Text of a message, or a list of parts."
    )
    call_id: str | None = None
    name: str | None = Field(default=None, description="Name of the called tool.")
    namespace: str | None = None
    arguments: str | None = None
    output: str | list[dict[str, Any]] | None = Field(
        default=None, description="Result of a tool call, as text or parts."
    )


class NamespacedTool(BaseModel):
    """Tool that the model may call: a function (`parameters`, a JSON schema) or a custom tool
    (`format` of its text).
    """

    model_config = ConfigDict(strict=True, extra="allow")

    type: str = Field(description="Kind of tool: `function` or `custom`.")
    name: str | None = Field(default=None, description="Name by which the model calls the tool.")
    description: str | None = Field(default=None, description="What the tool does, for the model.")
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = Field(
        default=None, description="Form of a custom tool's input."
    )


class ResponsesTool(NamespacedTool):
    """A tool, or a namespace with `tools`."""

    tools: Annotated[list[NamespacedTool], Field(max_length=MAX_TOOLS)] | None = None


class TextFormat(BaseModel):
    """Required form of the text."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="Any text, any JSON object, or JSON of a schema."
    )
    name: str | None = Field(default=None, description="Name of the schema.")
    description: str | None = Field(
        default=None, description="What the schema is for, for the model."
    )
    strict: bool | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")


class TextConfig(StrictModel):
    """The text's format."""

    format: TextFormat | None = Field(default=None, description="Form of the text.")
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(StrictModel):
    """Reasoning effort."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesStreamOptions(StrictModel):
    """Options of a stream."""

    include_obfuscation: Literal[False] | None = None


class ConversationRef(StrictModel):
    """A conversation by its id."""

    id: Annotated[str, StringConstraints(min_length=1, max_length=100)] = Field(
        description="Identifier of the conversation, `conv_...`."
    )


class ResponsesRequest(StrictRequest):
    """Body of a Responses request. Sampling fields beyond OpenAI's are vLLM's."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = UNSUPPORTED

    model: ModelName | None = None
    input: str | list[InputItem] = Field(description="Text, or a list of items.")
    instructions: str | None = None
    previous_response_id: Annotated[str, StringConstraints(max_length=100)] | None = None
    conversation: (
        Annotated[str, StringConstraints(min_length=1, max_length=100)] | ConversationRef | None
    ) = None
    store: bool | None = True
    background: bool | None = False
    stream: bool | None = False
    stream_options: ResponsesStreamOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    text: TextConfig | None = Field(default=None, description="Form and length of the text.")
    reasoning: Reasoning | None = Field(default=None, description="How much the model reasons.")
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: BatchMetadata | None = None
    service_tier: Tier | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: Priority | None = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None

    def check(self) -> None:
        """Check tools, format and modes in combination."""
        self._check_tools()
        self._check_modes()

    def ignored_fields(self) -> list[str]:
        """Includes hints about the text and the reasoning that have no effect here."""
        names = super().ignored_fields()
        if self.text is not None and self.text.verbosity in ("low", "high"):
            names.append("text.verbosity")
        names += [f"tools[{n}]" for n, tool in enumerate(self.tools or ()) if is_hosted(tool)]
        for name in ("summary", "generate_summary"):
            if self.reasoning and getattr(self.reasoning, name) in ("concise", "detailed"):
                names.append(f"reasoning.{name}")
        return names

    def _check_tools(self) -> None:
        check_tools(self.tools)
        for name in self.include or ():
            if name not in INCLUDABLE:
                raise UnsupportedField(f"{name[:100]!r} can't be included.", param="include")
        form = self.text.format if self.text else None
        if form and form.type == "json_schema" and (form.name is None or form.json_schema is None):
            raise InvalidRequest("A json_schema needs name and schema.", param="text.format")

    def _check_modes(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options may only be set when stream is true.", param="stream_options"
            )
        if self.background and self.store is False:
            raise InvalidRequest("background needs store to be true.", param="background")
        if self.conversation is not None and self.previous_response_id is not None:
            raise InvalidRequest(
                "conversation and previous_response_id can't be used together.",
                param="conversation",
            )
        if not self.input and self.previous_response_id is None and self.conversation is None:
            raise InvalidRequest("input must not be empty.", param="input")

    @property
    def conversation_id(self) -> str | None:
        """The id of the conversation to continue."""
        if isinstance(self.conversation, ConversationRef):
            return self.conversation.id
        return self.conversation

    @property
    def items(self) -> list[dict[str, Any]]:
        """The input as items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return [item.model_dump(exclude_unset=True) for item in self.input]
