"""The document itself, and `GET /openapi.json`."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from django.conf import settings
from django.http.response import HttpResponseBase
from django.urls import get_resolver
from drf_spectacular.contrib.pydantic import PydanticExtension
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.plumbing import ResolvedComponent
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from pydantic import BaseModel

from inference.api.health import version
from inference.schemas import objects as answers
from inference.web.views import GatewayRequest, GatewayView, NotFoundView, json_response

# -- What drf-spectacular must be told: our schemas are pydantic's, our keys are bearer tokens.


REF = "#/components/schemas/{model}"


class RequestsAndAnswers(PydanticExtension):
    """Requests as they are checked, with the names that clients use; answers as they are sent."""

    priority = 1

    def map_serializer(self, auto_schema: Any, direction: str) -> dict[str, Any]:
        """The JSON schema of the class; classes inside it become components of their own."""
        mode = "validation" if direction == "request" else "serialization"
        schema: dict[str, Any] = self.target.model_json_schema(ref_template=REF, mode=mode)
        for name, part in schema.pop("$defs", {}).items():
            component = ResolvedComponent(name, ResolvedComponent.SCHEMA, part, name)
            auto_schema.registry.register_on_missing(component)
        return schema


class ApiKeyScheme(OpenApiAuthenticationExtension):
    """`Authorization: Bearer sk-quire-...`, or `x-api-key`."""

    target_class = "inference.web.authentication.ApiKeyAuthentication"
    name = ["bearer", "apiKey"]

    def get_security_definition(self, auto_schema: Any) -> list[dict[str, Any]]:
        """Both ways to send a key."""
        return [
            {"type": "http", "scheme": "bearer"},
            {"type": "apiKey", "in": "header", "name": "x-api-key"},
        ]


# -- Each endpoint's entry in the document.


#: What any endpoint may answer, by status.
READ = (400, 401, 403, 406, 408, 413, 429, 500, 503)
#: Besides, those that read a body; 409 and 422 are idempotency keys'.
WRITE = (*READ, 404, 409, 415, 422)
PUBLIC = (400, 406, 408, 413, 500, 503)

PAGE = (
    OpenApiParameter("after", str, description="The id of the last object that you have."),
    OpenApiParameter("limit", int, description="Objects on a page."),
    OpenApiParameter("order", str, enum=["asc", "desc"]),
)
KEY = OpenApiParameter(
    "Idempotency-Key",
    str,
    OpenApiParameter.HEADER,
    description="The same request with the same key runs once within a day.",
)
UPLOAD: dict[str, Any] = {
    "type": "object",
    "required": ["file", "purpose"],
    "additionalProperties": False,
    "properties": {
        "file": {"type": "string", "format": "binary", "minLength": 1},
        "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
}


def errors(statuses: tuple[int, ...], envelope: type[BaseModel]) -> dict[Any, Any]:
    """The same envelope under each status."""
    return {(status, "application/json"): envelope for status in statuses}


def operation(
    tag: str,
    answer: Any,
    *,
    request: Any = None,
    streams: bool = False,
    statuses: tuple[int, ...] | None = None,
    envelope: type[BaseModel] = answers.ErrorAnswer,
    parameters: tuple[OpenApiParameter, ...] = (),
    extra: dict[Any, Any] | None = None,
    **more: Any,
) -> Any:
    """`extend_schema` for one of our endpoints: `streams` adds server-sent events."""
    chosen = statuses if statuses is not None else (WRITE if request is not None else READ)
    replies: dict[Any, Any] = {(200, "application/json"): answer}
    if streams:
        replies[(200, "text/event-stream")] = OpenApiTypes.STR
    return extend_schema(
        tags=[tag],
        request=request,
        responses=replies | errors(chosen, envelope) | (extra or {}),
        parameters=list(parameters),
        **more,
    )


# -- What the reference says at a glance: the groups in the order of interest, a line an operation.


INTRODUCTION = (
    "OpenAI's API, Anthropic's Messages and more, served from your own machines. Send an API key "
    "as `Authorization: Bearer sk-quire-...`, or as `x-api-key`."
)

TAGS = {
    "Chat": "Answers to a conversation. Those made with `store` can be listed and changed.",
    "Responses": "OpenAI's Responses: answers that are stored and can be continued or run later.",
    "Conversations": "Conversations that responses read and add to.",
    "Completions": "Text that continues a prompt.",
    "Messages": "Anthropic's Messages.",
    "Models": "The models that this key may use.",
    "Pooling": "Embeddings, classes, scores and rerankings, with models made for them.",
    "Files": "Files of a tenant: the input and output of batches.",
    "Batches": "Many requests in a file, answered in the background.",
    "Tokens": "Text to token ids and back.",
    "Organization": "What was used and what it cost, for keys with the scope `usage:read`.",
    "Service": "The state of this installation. No key is needed.",
    "Operator": "For keys with the operator's scope.",
}

SUMMARIES = {
    "post /v1/chat/completions": "Answer a conversation",
    "get /v1/chat/completions": "List stored answers",
    "get /v1/chat/completions/{completion_id}": "Read a stored answer",
    "post /v1/chat/completions/{completion_id}": "Change a stored answer's metadata",
    "delete /v1/chat/completions/{completion_id}": "Delete a stored answer",
    "get /v1/chat/completions/{completion_id}/messages": "List the messages of a stored answer",
    "post /v1/chat/completions/batch": "Answer several conversations at once",
    "post /v1/responses": "Create a response",
    "post /v1/chat/completions/render": "See a conversation's tokens",
    "post /v1/completions/render": "See a prompt's tokens",
    "post /v1/responses/render": "See an input's tokens",
    "post /v1/messages/render": "See a conversation's tokens",
    "post /inference/v1/generate": "Generate token ids from token ids",
    "post /generate": "Complete a prompt, as vLLM's oldest server does",
    "post /invocations": "Call any endpoint, recognised by the fields",
    "post /v1/responses/input_tokens": "Count an input's tokens",
    "get /v1/responses/{response_id}": "Read a response",
    "delete /v1/responses/{response_id}": "Delete a response",
    "post /v1/responses/{response_id}/cancel": "Cancel a background response",
    "get /v1/responses/{response_id}/input_items": "List a response's input",
    "post /v1/responses/compact": "Shorten a conversation",
    "post /v1/conversations": "Create a conversation",
    "get /v1/conversations/{conversation_id}": "Read a conversation's metadata",
    "post /v1/conversations/{conversation_id}": "Change a conversation's metadata",
    "delete /v1/conversations/{conversation_id}": "Delete a conversation",
    "get /v1/conversations/{conversation_id}/items": "List a conversation's items",
    "post /v1/conversations/{conversation_id}/items": "Add items to a conversation",
    "get /v1/conversations/{conversation_id}/items/{item_id}": "Read an item",
    "delete /v1/conversations/{conversation_id}/items/{item_id}": "Delete an item",
    "post /v1/completions": "Complete a prompt",
    "post /v1/messages": "Answer a conversation",
    "post /v1/messages/count_tokens": "Count a conversation's tokens",
    "get /v1/messages/batches": "List batches of messages",
    "post /v1/messages/batches": "Start a batch of messages",
    "get /v1/messages/batches/{batch_id}": "Read a batch's progress",
    "delete /v1/messages/batches/{batch_id}": "Delete a batch",
    "post /v1/messages/batches/{batch_id}/cancel": "Cancel a batch",
    "get /v1/messages/batches/{batch_id}/results": "Read a batch's results",
    "get /v1/models": "List models",
    "get /v1/models/{model}": "Read a model's facts",
    "get /v1/organization/usage/completions": "Sum up the usage of generating endpoints",
    "get /v1/organization/usage/embeddings": "Sum up the usage of pooling endpoints",
    "get /v1/organization/costs": "Sum up costs",
    "post /v1/embeddings": "Embed texts",
    "post /v1/moderations": "Moderate texts with a classifier",
    "post /pooling": "Pool texts by the model's own task",
    "post /classify": "Classify texts",
    "post /v1/classify": "Classify texts",
    "post /score": "Score pairs of texts",
    "post /v1/score": "Score pairs of texts",
    "post /rerank": "Rank documents for a query",
    "post /v1/rerank": "Rank documents for a query",
    "post /v2/rerank": "Rank documents for a query",
    "get /v1/files": "List files",
    "post /v1/files": "Upload a file",
    "get /v1/files/{file_id}": "Read a file's facts",
    "delete /v1/files/{file_id}": "Delete a file",
    "get /v1/files/{file_id}/content": "Download a file",
    "post /v1/uploads": "Announce a file that comes in parts",
    "post /v1/uploads/{upload_id}/parts": "Send a part of an upload",
    "post /v1/uploads/{upload_id}/complete": "Make the file from its parts",
    "post /v1/uploads/{upload_id}/cancel": "Cancel an upload",
    "get /v1/batches": "List batches",
    "post /v1/batches": "Start a batch",
    "get /v1/batches/{batch_id}": "Read a batch's progress",
    "post /v1/batches/{batch_id}/cancel": "Cancel a batch",
    "post /tokenize": "Turn text or a conversation into tokens",
    "post /detokenize": "Turn tokens into text",
    "get /health": "Whether all models can answer",
    "get /ping": "Whether this gateway answers",
    "post /ping": "Whether this gateway answers",
    "get /version": "The version",
    "get /metrics": "Figures for Prometheus",
    "get /load": "How many requests run and wait",
    "get /server_info": "Settings and replicas",
    "post /reset_prefix_cache": "Empty the prefix caches",
    "post /reset_mm_cache": "Does nothing: there is no such cache",
    "post /reset_encoder_cache": "Does nothing: there is no such cache",
    "post /pause": "Pause replicas",
    "post /resume": "Resume replicas",
    "get /is_paused": "Whether any replica is paused",
    "post /abort_requests": "Abort requests",
    "post /start_profile": "Start a profile",
    "post /stop_profile": "Stop the profile and write the trace",
    "post /collective_rpc": "Run a method on all replicas",
    "get /tokenizer_info": "Read a tokenizer's configuration",
    "post /v1/load_lora_adapter": "Load a LoRA adapter for all tenants",
    "post /v1/unload_lora_adapter": "Unload a LoRA adapter",
    "post /sleep": "Put replicas to sleep to free their memory",
    "post /wake_up": "Wake replicas up",
    "get /is_sleeping": "Whether any replica sleeps",
}


def summarise(document: dict[str, Any]) -> None:
    """Add introduction, groups and summaries to a document of OpenAPI, in place.

    Raises: KeyError for an operation that has none.
    """
    document["info"]["description"] = INTRODUCTION
    document["tags"] = [{"name": name, "description": text} for name, text in TAGS.items()]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            operation["summary"] = SUMMARIES[f"{method} {path}"]


#: By name: they lead here.
_URLS = "inference.urls"
#: What `generate` made when the tests last passed.
SNAPSHOT = Path(__file__).resolve().parents[2] / "docs" / "openapi.json"


def is_described(pattern: Any) -> bool:
    """Whether a URL belongs into the document."""
    return not issubclass(pattern.callback.cls, (NotFoundView, OpenApiView))


@lru_cache(maxsize=1)
def document() -> dict[str, Any]:
    """The OpenAPI document of this gateway, as plain JSON.

    Read from the repository, where it's kept: generating it would keep the first reader of a fresh
    gateway waiting for half a second of CPU time. Where there is no such file, it's generated.
    """
    try:
        kept: dict[str, Any] = msgspec.json.decode(SNAPSHOT.read_bytes())
    except FileNotFoundError:
        return generate()
    kept["info"]["version"] = version()
    if root := settings.FORCE_SCRIPT_NAME:
        kept["servers"] = [{"url": root}]
    return kept


def generate() -> dict[str, Any]:
    """The document, made of the views and their schemas."""
    from drf_spectacular.generators import SchemaGenerator

    from inference.openapi.describe import describe

    describe()
    patterns = [pattern for pattern in get_resolver(_URLS).url_patterns if is_described(pattern)]
    made: dict[str, Any] = SchemaGenerator(patterns=patterns).get_schema(request=None, public=True)
    made["info"]["version"] = version()
    summarise(made)
    # Lazy strings and the like become what they look like.
    return msgspec.json.decode(msgspec.json.encode(made, enc_hook=str))


@lru_cache(maxsize=1)
def encoded() -> bytes:
    """The document as it's served."""
    return msgspec.json.encode(document())


class OpenApiView(GatewayView):
    """What this gateway can be asked, for machines."""

    public = True

    async def get(self, request: GatewayRequest) -> HttpResponseBase:
        """The OpenAPI document."""
        return json_response(await asyncio.to_thread(encoded))
