"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase

from adapters.cards import access_models, access_target
from catalog.access import ModelCard
from inference.api.anthropic.errors import anthropic_error
from inference.engine_client.client import get_engine_client
from inference.schemas import objects
from inference.web.endpoint_schema import Endpoint, EndpointSchema
from inference.web.views import GatewayRequest, GatewayView, NotFoundView, json_response


def is_anthropic_client(request: HttpRequest) -> bool:
    """Whether the client is one of Anthropic's SDKs, which send their API version in a header."""
    return "HTTP_ANTHROPIC_VERSION" in request.META


class DualFormatView(GatewayView):
    """Renders errors in the format that the client's SDK reads."""

    def render_exception(self, request: GatewayRequest, error: Exception) -> HttpResponse:
        """See `GatewayView`."""
        if is_anthropic_client(request):
            return anthropic_error(error, request.request_id)
        return super().render_exception(request, error)


class UnknownPathView(DualFormatView, NotFoundView):
    """Any path of the API that doesn't exist, with any method."""


def model_info(card: ModelCard) -> dict[str, Any]:
    """Anthropic's `model`."""
    created = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
    return {
        "type": "model",
        "id": card.id,
        "display_name": card.id,
        "created_at": created,
        "lifecycle": "active",
        "max_input_tokens": card.max_model_len,
        "max_tokens": card.max_model_len,
    }


def model_page(cards: Sequence[ModelCard]) -> dict[str, Any]:
    data = [model_info(card) for card in cards]
    return {
        "data": data,
        "has_more": False,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }


def model_object(card: ModelCard) -> dict[str, Any]:
    """OpenAI's `model` object with vLLM's additions; `tasks` is known while the model is served.

    An adapter has its base model as `root` and `parent`, and the `digest` of the version in use.
    """
    info = get_engine_client().fleet.model(card.parent or card.alias_of or card.id)
    body = {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": card.owned_by,
        "root": card.root,
        "parent": card.parent or None,
        "max_model_len": card.max_model_len,
        "tasks": None if info is None else info.tasks,
    }
    return body | ({"digest": card.digest} if card.digest else {})


class ModelsView(DualFormatView):
    schema = EndpointSchema(
        "Models", get=Endpoint("List models", objects.ModelList, operation_id="v1_models_list")
    )
    required_scope = "models:read"

    async def get(self, request: GatewayRequest) -> HttpResponseBase:
        """All of them by name, each followed by its adapters."""
        cards = await access_models(request.caller)
        if is_anthropic_client(request):
            return json_response(model_page(cards))
        return json_response({"object": "list", "data": list(map(model_object, cards))})


class ModelView(DualFormatView):
    schema = EndpointSchema("Models", get=Endpoint("Read a model's facts", objects.Model))
    required_scope = "models:read"

    async def get(self, request: GatewayRequest, model: str) -> HttpResponseBase:
        """404 for a model that doesn't exist, or isn't the caller's."""
        card = (await access_target(request.caller, model)).card
        build_object = model_info if is_anthropic_client(request) else model_object
        return json_response(build_object(card))
