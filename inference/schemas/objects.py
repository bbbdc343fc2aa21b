"""Response schemas of the OpenAPI document. Tests validate real answers against them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, RootModel


class ApiObject(BaseModel):
    """Fields that are named here are always there; more may come."""

    # Only the document needs them: a gateway starts without building their validators.
    model_config = ConfigDict(extra="allow", protected_namespaces=(), defer_build=True)


class ErrorDetail(ApiObject):
    """`param`: the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(ApiObject):
    """OpenAI's error envelope."""

    error: ErrorDetail


class AnthropicErrorDetail(ApiObject):
    """Type and message of an error."""

    type: str
    message: str


class AnthropicErrorAnswer(ApiObject):
    """Anthropic's error envelope."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None


class TokenUsage(ApiObject):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CalledFunction(ApiObject):
    """A function and its arguments, as JSON text."""

    name: str
    arguments: str


class CalledCustom(ApiObject):
    """A custom tool and the text that it gets."""

    name: str
    input: str


class AnswerCall(ApiObject):
    """A tool call: of a function, or of a custom tool."""

    id: str
    type: Literal["function", "custom"]
    function: CalledFunction | None = None
    custom: CalledCustom | None = None


class AnswerMessage(ApiObject):
    """Message of the model; `reasoning_content` is the same as `reasoning`."""

    role: str
    content: str | None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[AnswerCall] | None = None


class ChatChoice(ApiObject):
    """One of `n` answers."""

    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class ChatCompletion(ApiObject):
    """A chat completion in one body."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage


class CompletionChoice(ApiObject):
    """One of the completions."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class Completion(ApiObject):
    """Completions in one body."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TokenUsage


class Model(ApiObject):
    """A model that the caller may use."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    tasks: list[str] | None


class ModelList(ApiObject):
    """All of them."""

    object: Literal["list"]
    data: list[Model]


class InputTokens(ApiObject):
    """Number of tokens of a response's input."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class StoredFileObject(ApiObject):
    """A file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str


class Deleted(ApiObject):
    """Confirmation of a deletion."""

    id: str
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

    data: list[StoredFileObject]


class RequestCounts(ApiObject):
    """A batch's progress."""

    total: int
    completed: int
    failed: int


class BatchObject(ApiObject):
    """A batch."""

    id: str
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
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchPage(Page):
    """Batches."""

    data: list[BatchObject]


class ResponseObject(ApiObject):
    """A response."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    previous_response_id: str | None
    usage: dict[str, Any] | None


class ChatCompletionPage(Page):
    """Stored chat completions."""

    data: list[ChatCompletion]


class ItemPage(Page):
    """Input items, or messages."""

    data: list[dict[str, Any]]


class AnthropicMessage(ApiObject):
    """A message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
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

    prompt: str


class TokensChoice(ApiObject):
    """One output in token ids."""

    index: int
    finish_reason: str | None
    token_ids: list[int]
    logprobs: dict[str, Any] | None


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
    stream: bool


class RenderedPrompts(RootModel[list[Rendered]]):
    """Rendered requests, one a prompt."""


class Texts(ApiObject):
    """The prompt with each output."""

    text: list[str]


class ModerationResult(ApiObject):
    """Moderation result of one text."""

    flagged: bool
    categories: dict[str, bool]
    category_scores: dict[str, float]


class Moderation(ApiObject):
    """Moderation results of texts."""

    id: str
    model: str
    results: list[ModerationResult]


class PooledList(ApiObject):
    """Pooled outputs, one a text."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    model: str
    usage: dict[str, Any]


class Ranking(ApiObject):
    """Documents, the best first."""

    results: list[dict[str, Any]]


class ConversationObject(ApiObject):
    """A conversation."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class ConversationItem(ApiObject):
    """An item."""

    id: str
    type: str


class UploadObject(ApiObject):
    """An upload, with its file once that is made."""

    id: str
    object: Literal["upload"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["pending", "completed", "cancelled"]
    file: StoredFileObject | None


class UploadPartObject(ApiObject):
    """A part."""

    id: str
    object: Literal["upload.part"]
    created_at: int
    upload_id: str


class MessageBatchObject(ApiObject):
    """A batch of messages."""

    id: str
    type: Literal["message_batch"]
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: dict[str, int]
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    results_url: str | None


class MessageBatchPage(ApiObject):
    """Batches of messages."""

    data: list[MessageBatchObject]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedMessageBatch(ApiObject):
    """A batch that was deleted."""

    id: str
    type: Literal["message_batch_deleted"]


class Compaction(ApiObject):
    """A conversation made short."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, Any]]
    usage: dict[str, Any]


class Transcript(ApiObject):
    """What was said. `verbose_json` has the language, the duration and the segments, too."""

    text: str
    usage: dict[str, Any]


class Health(ApiObject):
    """The installation's health. Insiders see more than the status."""

    status: Literal["ok", "unhealthy"]
    reasons: list[str] = []
    warnings: list[str] = []
    models: dict[str, Any] = {}


class Ready(ApiObject):
    """Whether this gateway can take requests. Insiders see why not."""

    status: Literal["ok", "unready"]
    reasons: list[str] = []


class Status(ApiObject):
    """This process answers."""

    status: Literal["ok"]


class Version(ApiObject):
    """The version of Quire."""

    version: str
