"""Response schemas of the OpenAPI document. Tests validate actual responses against them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel


class ApiObject(BaseModel):
    """Fields that are named here are always there; more may come."""

    # Only the document uses these models, so a gateway starts without building their validators.
    model_config = ConfigDict(extra="allow", protected_namespaces=(), defer_build=True)


class ErrorDetail(ApiObject):
    """`param`: the field at fault."""

    message: str = Field(description="What was wrong and what to do.")
    type: str = Field(description="Kind of error, such as `invalid_request_error`.")
    param: str | None
    code: str | None


class ErrorAnswer(ApiObject):
    """OpenAI's error envelope."""

    error: ErrorDetail = Field(description="The error.")


class AnthropicErrorDetail(ApiObject):
    """Type and message of an error."""

    type: str = Field(description="Kind of error, such as `rate_limit_error`.")
    message: str = Field(description="What was wrong and what to do.")


class AnthropicErrorAnswer(ApiObject):
    """Anthropic's error envelope."""

    type: Literal["error"] = Field(description="Always `error`.")
    error: AnthropicErrorDetail = Field(description="The error.")
    request_id: str | None


class TokenUsage(ApiObject):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CalledFunction(ApiObject):
    """A function and its arguments, as JSON text."""

    name: str = Field(description="Name of the called function.")
    arguments: str


class CalledCustom(ApiObject):
    """A custom tool and the text that it gets."""

    name: str = Field(description="Name of the called tool.")
    input: str = Field(description="Text that the tool gets.")


class AnswerCall(ApiObject):
    """A tool call: of a function, or of a custom tool."""

    id: str = Field(description="Identifier that the tool's result refers to.")
    type: Literal["function", "custom"] = Field(description="Kind of tool that is called.")
    function: CalledFunction | None = None
    custom: CalledCustom | None = None


class AnswerMessage(ApiObject):
    """Message of the model; `reasoning_content` is the same as `reasoning`."""

    role: str = Field(description="Always `assistant`.")
    content: str | None = Field(description="Text of the answer; null if it only calls tools.")
    reasoning: str | None = Field(default=None, description="Reasoning before the answer.")
    reasoning_content: str | None = None
    tool_calls: list[AnswerCall] | None = None


class ChatChoice(ApiObject):
    """One of `n` answers."""

    index: int
    message: AnswerMessage = Field(description="Message of the model.")
    logprobs: dict[str, Any] | None = Field(
        description="Log probabilities of the tokens, if requested."
    )
    finish_reason: str | None


class ChatCompletion(ApiObject):
    """A chat completion in one body."""

    id: str = Field(description="Identifier of the completion, `chatcmpl-...`.")
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage


class CompletionChoice(ApiObject):
    """One of the completions."""

    index: int
    text: str = Field(description="Generated text.")
    logprobs: dict[str, Any] | None = Field(
        description="Log probabilities of the tokens, if requested."
    )
    finish_reason: str | None


class Completion(ApiObject):
    """Completions in one body."""

    id: str = Field(description="Identifier of the completion, `cmpl-...`.")
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TokenUsage


class Model(ApiObject):
    """A model that the caller may use."""

    id: str = Field(description="Name of the model or adapter, for `model` in requests.")
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    tasks: list[str] | None


class ModelList(ApiObject):
    """All of them."""

    object: Literal["list"]
    data: list[Model] = Field(description="Models and adapters that the key may use.")


class InputTokens(ApiObject):
    """Number of tokens of a response's input."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class StoredFileObject(ApiObject):
    """A file."""

    id: str = Field(description="Identifier of the file.")
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str


class Deleted(ApiObject):
    """Confirmation of a deletion."""

    id: str = Field(description="Identifier of the deleted object.")
    object: str
    deleted: bool


class Page(ApiObject):
    """One page of a list."""

    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FilePage(Page):
    """Files."""

    data: list[StoredFileObject] = Field(description="Files of this page.")


class RequestCounts(ApiObject):
    """A batch's progress."""

    total: int
    completed: int
    failed: int


class BatchObject(ApiObject):
    """A batch."""

    id: str = Field(description="Identifier of the batch.")
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating",
        "failed",
        "in_progress",
        "finalizing",
        "completed",
        "expired",
        "cancelling",
        "cancelled",
    ] = Field(description="State of the batch.")
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchPage(Page):
    """Batches."""

    data: list[BatchObject] = Field(description="Batches of this page.")


class ResponseObject(ApiObject):
    """A response."""

    id: str = Field(description="Identifier of the response, `resp_...`.")
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"] = (
        Field(description="State of the response.")
    )
    model: str
    output: list[dict[str, Any]] = Field(
        description="Messages, reasoning and tool calls, in order."
    )
    error: dict[str, Any] | None = Field(description="Why the response failed; null otherwise.")
    incomplete_details: dict[str, Any] | None
    previous_response_id: str | None
    usage: dict[str, Any] | None


class ChatCompletionPage(Page):
    """Stored chat completions."""

    data: list[ChatCompletion] = Field(description="Stored completions of this page.")


class ItemPage(Page):
    """Input items, or messages."""

    data: list[dict[str, Any]] = Field(description="Items of this page.")


class AnthropicMessage(ApiObject):
    """A message."""

    id: str = Field(description="Identifier of the message, `msg_...`.")
    type: Literal["message"] = Field(description="Always `message`.")
    role: Literal["assistant"] = Field(description="Always `assistant`.")
    model: str
    content: list[dict[str, Any]] = Field(description="Blocks of text, thinking and tool calls.")
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, Any]


class TokenCount(ApiObject):
    """Number of tokens of a conversation."""

    input_tokens: int


class Tokens(ApiObject):
    """A text in tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(ApiObject):
    """Tokens as a text."""

    prompt: str = Field(description="Text of the tokens.")


class TokensChoice(ApiObject):
    """One output in token ids."""

    index: int
    finish_reason: str | None
    token_ids: list[int]
    logprobs: dict[str, Any] | None = Field(
        description="Log probabilities of the tokens, if requested."
    )


class TokenGeneration(ApiObject):
    """Outputs in token ids."""

    request_id: str
    choices: list[TokensChoice]
    usage: TokenUsage


class Rendered(ApiObject):
    """Rendered request."""

    request_id: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    model: str
    stream: bool = Field(description="Whether the request asks for a stream.")


class RenderedPrompts(RootModel[list[Rendered]]):
    """Rendered requests, one a prompt."""


class Texts(ApiObject):
    """The prompt with each output."""

    text: list[str] = Field(description="The prompt with each output.")


class ModerationResult(ApiObject):
    """Moderation result of one text."""

    flagged: bool
    categories: dict[str, bool]
    category_scores: dict[str, float]


class Moderation(ApiObject):
    """Moderation results of texts."""

    id: str = Field(description="Identifier of the request.")
    model: str
    results: list[ModerationResult] = Field(description="Result of each text.")


class PooledList(ApiObject):
    """Pooled outputs, one a text."""

    object: Literal["list"]
    data: list[dict[str, Any]] = Field(description="Result of each text.")
    model: str
    usage: dict[str, Any]


class Ranking(ApiObject):
    """Documents, the best first."""

    results: list[dict[str, Any]] = Field(
        description="Index and relevance of each document, best first."
    )


class ConversationObject(ApiObject):
    """A conversation."""

    id: str = Field(description="Identifier of the conversation, `conv_...`.")
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class ConversationItem(ApiObject):
    """An item."""

    id: str = Field(description="Identifier of the item.")
    type: str = Field(description="Kind of item, such as `message` or `function_call`.")


class UploadObject(ApiObject):
    """An upload, with its file once that is made."""

    id: str = Field(description="Identifier of the upload.")
    object: Literal["upload"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["pending", "completed", "cancelled"] = Field(description="State of the upload.")
    file: StoredFileObject | None = Field(description="The file, once the upload is complete.")


class UploadPartObject(ApiObject):
    """A part."""

    id: str = Field(description="Identifier of the part.")
    object: Literal["upload.part"]
    created_at: int
    upload_id: str


class MessageBatchObject(ApiObject):
    """A batch of messages."""

    id: str = Field(description="Identifier of the batch.")
    type: Literal["message_batch"] = Field(description="Always `message_batch`.")
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: dict[str, int]
    created_at: str = Field(description="Time of creation, in ISO 8601.")
    expires_at: str = Field(description="Time at which open requests expire, in ISO 8601.")
    ended_at: str | None
    cancel_initiated_at: str | None
    results_url: str | None


class MessageBatchPage(ApiObject):
    """Batches of messages."""

    data: list[MessageBatchObject] = Field(description="Batches of this page.")
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedMessageBatch(ApiObject):
    """A batch that was deleted."""

    id: str = Field(description="Identifier of the deleted batch.")
    type: Literal["message_batch_deleted"] = Field(description="Always `message_batch_deleted`.")


class Compaction(ApiObject):
    """A conversation made short."""

    id: str = Field(description="Identifier of the compaction.")
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, Any]] = Field(
        description="Items that stand for the conversation in later requests."
    )
    usage: dict[str, Any]


class Transcript(ApiObject):
    """A transcription. `verbose_json` also has the language, the duration and the segments."""

    text: str = Field(description="What was said.")
    usage: dict[str, Any]


class Health(ApiObject):
    """The installation's health. Insiders see more than the status."""

    status: Literal["ok", "unhealthy"] = Field(
        description="Whether each loaded model has a replica that works."
    )
    reasons: list[str] = []
    warnings: list[str] = []
    models: dict[str, Any] = Field(default={}, description="State of each model.")


class Ready(ApiObject):
    """Whether this gateway can take requests. Insiders see why not."""

    status: Literal["ok", "unready"] = Field(description="Whether this gateway can take requests.")
    reasons: list[str] = []


class Status(ApiObject):
    """This process answers."""

    status: Literal["ok"] = Field(description="Always `ok`.")


class Version(ApiObject):
    """The version of Quire."""

    version: str
