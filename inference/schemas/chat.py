"""The body of `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from django.conf import settings
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    StringConstraints,
    ValidationError,
    model_validator,
)

from engine.contract.errors import InvalidRequest
from engine.text.chat_messages import check_template_kwargs
from inference.errors import UnsupportedField, describe_validation_error
from inference.parsers.tool_grammar import ToolFunction
from inference.schemas.base import UNSUPPORTED, FailFastModel, RejectedRequest
from inference.schemas.sampling import SamplingFields
from inference.schemas.tools import AllowedTools, AnyTool, Tools, named_tool

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
#: Types of text parts -> the field with the text. The Responses API's types are accepted too.
TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}


#: Types of image parts, which have an `image_url`, `image_embeds`, or the `file_id` of an uploaded
#: file.
IMAGE_PARTS = ("image_url", "input_image", "image_embeds")
#: Type of a video part, which has a `video_url` or a `file_id`.
VIDEO_PART = "video_url"
#: Types of audio parts, which have an `audio_url`, `input_audio` or a `file_id`.
AUDIO_PARTS = ("audio_url", "audio", "input_audio", "audio_embeds")
#: Type of a document part: a PDF or text.
FILE_PART = "file"
#: Types of parts, and the fields of which such a part has one.
_SOURCES = (
    (IMAGE_PARTS, ("image_url", "image_embeds", "file_id")),
    ((VIDEO_PART,), (VIDEO_PART, "file_id")),
    (AUDIO_PARTS, ("audio_url", "input_audio", "audio_embeds", "file_id")),
)


def part_type(part: Mapping[str, Any]) -> Any:
    """Return a content part's type; {"image_url": ...} and {"text": ...} are parts without one."""
    names = (
        *("image_url", "image_embeds", VIDEO_PART),
        *("audio_url", "input_audio", "audio_embeds", "thinking"),
    )
    untyped = next((name for name in names if name in part), "text")
    return part.get("type") or untyped


class ImageURL(BaseModel):
    """A picture's address: `data:` with the file in base64, or https.

    `detail` is OpenAI's; how much a model sees is its processor's to say.
    """

    model_config = ConfigDict(strict=True)

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImageEmbeds(BaseModel):
    """An image as its encoder's vectors, and how many frames, rows and columns of patches they are,
    for a model whose positions depend on it.
    """

    model_config = ConfigDict(strict=True)

    image_embeds: str = Field(description="Base64 tensor of the vectors that stand for it.")
    image_grid_thw: str | None = Field(default=None, description="Base64 tensor, int64 [1, 3].")


class VideoURL(BaseModel):
    """A video's address: `data:` with the file in base64, or https."""

    model_config = ConfigDict(strict=True)

    url: str


class AudioURL(BaseModel):
    """A sound's address: `data:` with the file in base64, or https."""

    model_config = ConfigDict(strict=True)

    url: str


class InputAudio(BaseModel):
    """A file of sound in base64. `format` is a hint: a file is known by its content."""

    model_config = ConfigDict(strict=True)

    data: str = Field(description="The file in base64.")
    format: Annotated[str, StringConstraints(max_length=20)] | None = None


class DocumentFile(BaseModel):
    """A document: in base64, as a `data:` address or bare, by its address, or an uploaded file.

    `filename` is shown to the model.
    """

    model_config = ConfigDict(strict=True)

    file_data: str | None = None
    file_url: str | None = None
    file_id: str | None = None
    filename: Annotated[str, StringConstraints(max_length=1000)] | None = None

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if sum(bool(value) for value in (self.file_data, self.file_url, self.file_id)) != 1:
            raise ValueError("a file needs one of 'file_data', 'file_url' and 'file_id'.")
        return self


class ContentPart(BaseModel):
    """A part of a message's content: text, a picture, a video, sound or a document.

    `uuid` is a hint: a picture is known by its content.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    type: str = Field(
        description="Kind of part: `text`, `image_url`, `video_url`, `input_audio` or `file`."
    )
    file_id: str | None = None
    uuid: str | None = None
    text: str | None = Field(default=None, description="Text of a text part.")
    refusal: str | None = None
    thinking: str | None = Field(default=None, description="Text of a thinking part.")
    image_url: ImageURL | str | None = None
    image_embeds: ImageEmbeds | str | None = Field(
        default=None, description="Image as a base64 tensor of the vectors that stand for it."
    )
    video_url: VideoURL | str | None = None
    audio_url: AudioURL | str | None = Field(default=None, description="Address of a sound.")
    input_audio: InputAudio | None = Field(default=None, description="Sound in base64.")
    audio_embeds: str | None = Field(
        default=None, description="Sound as a base64 tensor of the vectors that stand for it."
    )
    file: DocumentFile | None = Field(default=None, description="Document of a file part.")

    @model_validator(mode="before")
    @classmethod
    def _infer_type(cls, data: Any) -> Any:
        return {**data, "type": part_type(data)} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        for types, names in _SOURCES:
            if self.type in types:
                if sum(getattr(self, name) is not None for name in names) != 1:
                    *first, last = (f"'{name}'" for name in names)
                    raise ValueError(
                        f"a part of type '{self.type}' needs one of the fields "
                        f"{', '.join(first)} and {last}."
                    )
                return self
        if self.type == FILE_PART:
            if self.file is None:
                raise ValueError("a part of type 'file' needs the field 'file'.")
            return self
        field = TEXT_PARTS.get(self.type)
        if field is None:
            raise ValueError(f"content parts of type '{self.type[:50]}' are not supported.")
        if getattr(self, field) is None:
            raise ValueError(f"a part of type '{self.type}' needs the field '{field}'.")
        return self


class CalledFunction(BaseModel):
    """A call's function: its name, and its arguments as JSON text (also taken: an object, null)."""

    model_config = ConfigDict(strict=True)

    name: str = Field(description="Name of the called function.")
    arguments: str | dict[str, Any] | None = None


class ToolCall(BaseModel):
    """A call that the assistant made earlier."""

    model_config = ConfigDict(strict=True, extra="allow")

    id: str | None = Field(default=None, description="Identifier that the tool's result refers to.")
    type: Literal["function"] = Field(default="function", description="Always `function`.")
    function: CalledFunction


class CalledCustom(BaseModel):
    """A call's custom tool: its name, and the text that it got."""

    model_config = ConfigDict(strict=True)

    name: str = Field(description="Name of the called tool.")
    input: str = Field(description="Text that the tool gets.")


class CustomCall(BaseModel):
    """A call of a custom tool that the assistant made earlier."""

    model_config = ConfigDict(strict=True, extra="allow")

    id: str | None = Field(default=None, description="Identifier that the tool's result refers to.")
    type: Literal["custom"] = Field(description="Always `custom`.")
    custom: CalledCustom


class Message(FailFastModel):
    """One message of a chat. Fields beyond these reach the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Role = Field(description="Author of the message.")
    content: str | list[str | ContentPart] | None = Field(
        default=None, description="Text, or a list of parts."
    )
    name: str | None = Field(
        default=None, description="Name of the author, for chat templates that show one."
    )
    tool_calls: list[ToolCall | CustomCall] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        """Check that content is present; null means none, which is valid only with calls."""
        has_calls = self.role == "assistant" and (self.tool_calls or self.function_call)
        if "content" not in self.model_fields_set and not has_calls:
            raise ValueError(f"a message of role '{self.role}' needs content.")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a message of role 'tool' needs a tool_call_id.")
        if self.role == "function" and self.name is None:
            raise ValueError("a message of role 'function' needs a name.")
        return self


Messages = Annotated[list[Message], Field(min_length=1)]


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(SamplingFields):
    """A chat to answer."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {**UNSUPPORTED, "prompt_embeds": ()}

    messages: Messages
    store: bool | None = False
    max_completion_tokens: int | None = None
    logprobs: bool | None = Field(
        default=False, description="Whether log probabilities of the tokens are returned."
    )
    top_logprobs: int | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    echo: bool | None = False
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    add_special_tokens: bool | None = False
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = True
    thinking_token_budget: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, dict[str, Any]] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None

    #: Relaxations for endpoints that are implemented by chats; see `with_leniency`.
    _clamp_max_tokens: bool = PrivateAttr(default=False)
    _allow_late_system: bool = PrivateAttr(default=False)
    _raw_messages: list[dict[str, Any]] = PrivateAttr(default_factory=list)
    _allowed: AllowedTools | None = PrivateAttr(default=None)
    _named_function: str | None = PrivateAttr(default=None)

    @model_validator(mode="wrap")
    @classmethod
    def _keep_messages(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        chat = handler(data)
        chat._raw_messages = data["messages"]
        return chat

    def with_leniency(self, *, any_limit: bool = False, system_anywhere: bool = False) -> Self:
        """Return the chat with relaxed checks. `any_limit`: an output limit may exceed the context
        and is clamped. `system_anywhere`: system messages may follow others in any template.
        """
        self._clamp_max_tokens, self._allow_late_system = any_limit, system_anywhere
        return self

    @property
    def cuts_any_limit(self) -> bool:
        """See `with_leniency`."""
        return self._clamp_max_tokens

    @property
    def system_anywhere(self) -> bool:
        """See `with_leniency`."""
        return self._allow_late_system

    @property
    def raw_messages(self) -> list[dict[str, Any]]:
        """The validated messages as sent: templates may use fields that Quire doesn't know."""
        return self._raw_messages

    @model_validator(mode="after")
    def _check(self) -> Self:
        for check in (self._check_template, self._check_limits, self._check_tools):
            try:
                check()
            except InvalidRequest as error:
                raise RejectedRequest(error) from None
        return self

    def _check_template(self) -> None:
        allowed = settings.QUIRE.request_chat_templates
        if self.chat_template is not None and not allowed:
            raise UnsupportedField(
                "This server accepts no chat templates from requests.", param="chat_template"
            )
        check_template_kwargs(self.chat_template_kwargs or {})
        if self.continue_final_message and self.add_generation_prompt:
            if "add_generation_prompt" in self.model_fields_set:
                raise InvalidRequest(
                    "continue_final_message and add_generation_prompt can't be used together.",
                    param="continue_final_message",
                )
            self.add_generation_prompt = False
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise InvalidRequest(
                "continue_final_message needs an assistant's message at the end.",
                param="continue_final_message",
            )

    def _check_limits(self) -> None:
        for kind in sorted((self.media_io_kwargs or {}).keys() - {"video"}):
            raise InvalidRequest(
                f"media_io_kwargs must have the key 'video' alone; got {kind[:50]!r}.",
                param="media_io_kwargs",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
        if self.stream and (self.best_of or 1) > (self.n or 1):
            raise InvalidRequest("best_of over n can't be streamed.", param="best_of")

    def _check_tools(self) -> None:
        choice = self.tool_choice
        if isinstance(choice, str) and choice not in ("none", "auto", "required"):
            raise InvalidRequest(
                "tool_choice must be 'none', 'auto', 'required' or name a function.",
                param="tool_choice",
            )
        if choice not in (None, "none") and not self.tools:
            raise InvalidRequest("tool_choice needs tools.", param="tool_choice")
        offered = {tool.name: (tool.type, tool.name) for tool in self.tools or ()}
        if len(offered) != len(self.tools or ()):
            raise InvalidRequest("Two tools have the same name.", param="tools")
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            self._check_allowed(choice, set(offered.values()))
        elif isinstance(choice, dict):
            if (named := named_tool(choice)) is None or named not in offered.values():
                raise InvalidRequest(
                    'tool_choice must be {"type": "function", "function": {"name": ...}} (or '
                    '"custom" in both places) with the name of one of the tools.',
                    param="tool_choice",
                )
            self._named_function = named[1]

    def _check_allowed(self, choice: dict[str, Any], offered: set[tuple[str, str]]) -> None:
        try:
            self._allowed = AllowedTools.model_validate(choice.get("allowed_tools"))
        except ValidationError as error:
            detail = describe_validation_error(error)
            param = f"tool_choice.allowed_tools.{detail['param'] or ''}".rstrip(".")
            raise InvalidRequest(detail["message"], param=param) from None
        if not self._allowed.named <= offered:
            raise InvalidRequest(
                'Each entry must be {"type": "function", "function": {"name": ...}} (or "custom" '
                "in both places) with the name of one of the tools.",
                param="tool_choice.allowed_tools.tools",
            )

    @property
    def named_function(self) -> str | None:
        """Name of the tool that must be called, if the client named one."""
        return self._named_function

    @property
    def requires_tool_call(self) -> bool:
        """Whether the answer must consist of calls."""
        if self._allowed is not None:
            return self._allowed.mode == "required"
        return self.tool_choice == "required" or self.named_function is not None

    @property
    def has_allowed_tools(self) -> bool:
        """Whether only some of the tools may be called."""
        return self._allowed is not None

    def _is_allowed(self, tool: AnyTool) -> bool:
        return self._allowed is None or (tool.type, tool.name) in self._allowed.named

    @property
    def tools_in_use(self) -> list[dict[str, Any]] | None:
        """The tools offered to the model, as functions; None if it may not call any."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.template_function for tool in self.tools if self._is_allowed(tool)]

    @property
    def functions_in_use(self) -> tuple[ToolFunction, ...]:
        """The functions that the model may call."""
        if self.tools_in_use is None:
            return ()
        return tuple(tool.as_tool_function for tool in self.tools or () if self._is_allowed(tool))

    @property
    def custom_tools(self) -> frozenset[str]:
        """Names of custom tools, whose calls contain text instead of arguments."""
        return frozenset(tool.name for tool in self.tools or () if tool.type == "custom")

    def ignored_fields(self) -> list[str]:
        """Return ignored fields, with `max_tokens` if `max_completion_tokens` differs."""
        older, newer = self.max_tokens, self.max_completion_tokens
        differs = newer is not None and older not in (None, newer)
        return sorted([*super().ignored_fields(), *(["max_tokens"] if differs else [])])

    @property
    def output_limit(self) -> int | None:
        """Maximum number of output tokens; None if the request has no limit."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives per token; None without log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class ChatBatchRequest(ChatRequest):
    """Several chats to answer, all with the same settings: what the batch endpoint describes.

    Each conversation is checked as a `ChatRequest` of its own.
    """

    messages: Annotated[list[Messages], Field(min_length=1)]  # type: ignore[assignment]
