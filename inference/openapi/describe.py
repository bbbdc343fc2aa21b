"""Attaches to each view what the document says of it."""

from __future__ import annotations

from typing import Any

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema_view

from engine.contract.messages import SLEEP_LEVELS, SLEEP_TAGS
from inference.api import chat as stored
from inference.api import files as files
from inference.api import operator as operator
from inference.api import operator as sleep
from inference.api import organization as organization
from inference.api import tokenization as tokenize
from inference.api.anthropic import schemas as anthropic_schemas
from inference.api.anthropic import views as anthropic
from inference.api.batches import views as batches
from inference.api.chat import ChatBatchView
from inference.api.completions import CompletionsView
from inference.api.health import HealthView, MetricsView, PingView, VersionView
from inference.api.models import ModelsView, ModelView
from inference.api.pooling import schemas as pooled
from inference.api.pooling import views as pooling
from inference.api.responses import views as responses
from inference.api.responses.schemas import ResponsesRequest
from inference.openapi import kept_views, operator_views, token_views
from inference.openapi.document import KEY, PAGE, PUBLIC, READ, UPLOAD, WRITE, errors, operation
from inference.schemas import objects as answers
from inference.schemas import objects as service_answers
from inference.schemas.base import BatchRequest
from inference.schemas.chat import ChatBatchRequest, ChatRequest
from inference.schemas.completions import CompletionRequest

FOUND = (*READ, 404)
MODEL_OF_REPLICAS = OpenApiParameter("model", str, description="Limit to this model's replicas.")
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
CHANGED = (*FOUND, 409, 415, 422)
LISTED: dict[str, Any] = {"style": "form", "explode": True}


def report(view: type[organization.ReportView]) -> dict[str, Any]:
    """A report over buckets of time."""
    names = ("project_ids", "user_ids", "api_key_ids", "models")
    return {
        "get": operation(
            "Organization",
            service_answers.Report,
            statuses=FOUND,
            parameters=(
                OpenApiParameter("start_time", int, required=True, description="Unix time."),
                OpenApiParameter("end_time", int, description="Unix seconds, exclusive."),
                OpenApiParameter("bucket_width", str, enum=list(view.widths), default="1d"),
                OpenApiParameter("group_by", str, enum=list(view.groups), many=True, **LISTED),
                *(OpenApiParameter(name, str, many=True, **LISTED) for name in names),
                OpenApiParameter("limit", int, description="Buckets on a page."),
                OpenApiParameter("page", str, description="`next_page` of the last answer."),
                OpenApiParameter("format", str, enum=["json", "csv"], default="json"),
            ),
            extra={(200, "text/csv"): OpenApiTypes.STR},
        )
    }


TEXT = {(200, "text/plain"): OpenApiTypes.STR, **errors(READ, answers.ErrorAnswer)}


def generating(tag: str, answer: Any, request: Any, **more: Any) -> Any:
    """An endpoint that generates, in one body or as a stream."""
    return operation(tag, answer, request=request, streams=True, parameters=(KEY,), **more)


VIEWS: dict[Any, dict[str, Any]] = {
    stored.StoredCompletionsView: {
        "get": operation(
            "Chat",
            answers.ChatCompletionPage,
            statuses=FOUND,
            parameters=(
                *PAGE,
                OpenApiParameter("model", str, description="Those of this model."),
                OpenApiParameter("metadata", TEXTS, style="deepObject", explode=True),
            ),
            operation_id="v1_chat_completions_list",
        ),
        "post": generating("Chat", answers.ChatCompletion, ChatRequest),
    },
    stored.StoredCompletionView: {
        "get": operation("Chat", answers.ChatCompletion, statuses=FOUND),
        "post": operation(
            "Chat",
            answers.ChatCompletion,
            request=stored.CompletionUpdate,
            operation_id="v1_chat_completions_update",
        ),
        "delete": operation("Chat", answers.Deleted, statuses=FOUND),
    },
    stored.CompletionMessagesView: {
        "get": operation("Chat", answers.ItemPage, statuses=FOUND, parameters=PAGE),
    },
    ChatBatchView: {
        "post": operation("Chat", answers.ChatCompletion, request=ChatBatchRequest),
    },
    CompletionsView: {
        "post": generating("Completions", answers.Completion, CompletionRequest),
    },
    ModelsView: {"get": operation("Models", answers.ModelList, operation_id="v1_models_list")},
    ModelView: {"get": operation("Models", answers.Model, statuses=FOUND)},
    responses.ResponsesView: {
        "post": generating("Responses", answers.ResponseObject, ResponsesRequest),
    },
    responses.InputTokensView: {
        "post": operation("Responses", answers.InputTokens, request=ResponsesRequest),
    },
    responses.ResponseView: {
        "get": operation(
            "Responses",
            answers.ResponseObject,
            streams=True,
            statuses=FOUND,
            parameters=(
                OpenApiParameter("stream", bool, description="Stream the events."),
                OpenApiParameter("starting_after", int, description="Last event received."),
            ),
        ),
        "delete": operation("Responses", answers.Deleted, statuses=FOUND),
    },
    responses.ResponseCancelView: {
        "post": operation("Responses", answers.ResponseObject, statuses=CHANGED),
    },
    responses.ResponseInputItemsView: {
        "get": operation("Responses", answers.ItemPage, statuses=FOUND, parameters=PAGE),
    },
    anthropic.MessagesView: {
        "post": generating(
            "Messages",
            answers.AnthropicMessage,
            anthropic_schemas.MessagesRequest,
            envelope=answers.AnthropicErrorAnswer,
        ),
    },
    anthropic.CountTokensView: {
        "post": operation(
            "Messages",
            answers.TokenCount,
            request=anthropic_schemas.CountTokensRequest,
            envelope=answers.AnthropicErrorAnswer,
        ),
    },
    files.FilesView: {
        "get": operation(
            "Files", answers.FilePage, statuses=FOUND, parameters=PAGE, operation_id="v1_files_list"
        ),
        "post": operation(
            "Files",
            answers.StoredFileObject,
            request={"multipart/form-data": UPLOAD},
        ),
    },
    files.FileView: {
        "get": operation("Files", answers.StoredFileObject, statuses=FOUND),
        "delete": operation("Files", answers.Deleted, statuses=(*FOUND, 409)),
    },
    files.FileContentView: {
        "get": operation(
            "Files",
            OpenApiTypes.BINARY,
            statuses=FOUND,
            extra={(200, "application/octet-stream"): OpenApiTypes.BINARY},
        ),
    },
    batches.BatchesView: {
        "get": operation(
            "Batches",
            answers.BatchPage,
            statuses=FOUND,
            parameters=PAGE[:2],
            operation_id="v1_batches_list",
        ),
        "post": operation("Batches", answers.BatchObject, request=BatchRequest, parameters=(KEY,)),
    },
    batches.BatchView: {"get": operation("Batches", answers.BatchObject, statuses=FOUND)},
    batches.BatchCancelView: {
        "post": operation("Batches", answers.BatchObject, statuses=CHANGED),
    },
    pooling.EmbeddingsView: {
        "post": operation(
            "Pooling", answers.PooledList, request=pooled.EmbeddingRequest, parameters=(KEY,)
        ),
    },
    pooling.PoolingView: {
        "post": operation("Pooling", answers.PooledList, request=pooled.PoolingRequest),
    },
    pooling.ClassifyView: {
        "post": operation("Pooling", answers.PooledList, request=pooled.ClassifyRequest),
    },
    pooling.ScoreView: {
        "post": operation("Pooling", answers.PooledList, request=pooled.ScoreRequest),
    },
    pooling.RerankView: {
        "post": operation("Pooling", answers.Ranking, request=pooled.RerankRequest),
    },
    pooling.RerankV2View: {
        "post": operation("Pooling", answers.Ranking, request=pooled.RerankV2Request),
    },
    tokenize.TokenizeView: {
        "post": operation("Tokens", answers.Tokens, request=tokenize.TokenizeRequest),
    },
    tokenize.DetokenizeView: {
        "post": operation("Tokens", answers.Text, request=tokenize.DetokenizeRequest),
    },
    organization.CompletionsUsageView: report(organization.CompletionsUsageView),
    organization.EmbeddingsUsageView: report(organization.EmbeddingsUsageView),
    organization.CostsView: report(organization.CostsView),
    HealthView: {
        "get": operation(
            "Service",
            service_answers.Health,
            statuses=PUBLIC[:-1],
            extra={(503, "application/json"): service_answers.Health},
        )
    },
    PingView: {
        "get": operation("Service", service_answers.Status, statuses=PUBLIC),
        "post": operation("Service", service_answers.Status, statuses=PUBLIC),
    },
    VersionView: {"get": operation("Service", service_answers.Version, statuses=PUBLIC)},
    MetricsView: {"get": operation("Service", OpenApiTypes.STR, statuses=READ, extra=TEXT)},
    operator.ResetPrefixCacheView: {
        "post": operation(
            "Operator",
            service_answers.CommandResult,
            statuses=WRITE,
            extra={(503, "application/json"): service_answers.CommandResult},
            parameters=(
                OpenApiParameter(
                    "reset_running_requests",
                    bool,
                    default=False,
                    description="Requests that run compute theirs anew.",
                ),
                MODEL_OF_REPLICAS,
            ),
        ),
    },
    sleep.SleepView: {
        "post": operation(
            "Operator",
            service_answers.CommandResult,
            statuses=WRITE,
            extra={(503, "application/json"): service_answers.CommandResult},
            parameters=(
                OpenApiParameter("level", int, enum=list(SLEEP_LEVELS), default=1),
                MODEL_OF_REPLICAS,
            ),
        ),
    },
    sleep.WakeUpView: {
        "post": operation(
            "Operator",
            service_answers.CommandResult,
            statuses=WRITE,
            extra={(503, "application/json"): service_answers.CommandResult},
            parameters=(
                OpenApiParameter("tags", str, enum=list(SLEEP_TAGS), many=True),
                MODEL_OF_REPLICAS,
            ),
        ),
    },
    sleep.IsSleepingView: {
        "get": operation(
            "Operator",
            service_answers.IsSleeping,
            statuses=FOUND,
            parameters=(MODEL_OF_REPLICAS,),
        )
    },
    operator.LoadView: {"get": operation("Operator", service_answers.Load)},
    operator.ServerInfoView: {"get": operation("Operator", service_answers.ServerInfo)},
}


def describe() -> None:
    """Attach all of it. The last entry for a view holds, so doing it twice changes nothing."""
    described = VIEWS | kept_views.VIEWS | token_views.VIEWS | operator_views.VIEWS
    for view, methods in described.items():
        extend_schema_view(**methods)(view)
