"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from typing import Any

import msgspec
from django.http.response import HttpResponseBase

from catalog.access import ModelCard, access_model, access_models
from inference.anthropic.models import model_info, model_page, speaks_anthropic
from inference.engine_client import get_engine_client
from inference.web.views import GatewayRequest, GatewayView, json_response

_encode = msgspec.json.Encoder().encode


def model_object(card: ModelCard) -> dict[str, Any]:
    """OpenAI's `model` object, with vLLM's additions; `tasks` is known while it's served."""
    info = get_engine_client().fleet.model(card.alias_of or card.id)
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": card.owned_by,
        "root": card.root,
        "parent": None,
        "max_model_len": card.max_model_len,
        "tasks": None if info is None else info.tasks,
    }


class ModelsView(GatewayView):
    """The models that the caller may use."""

    required_scope = "models:read"

    async def get(self, request: GatewayRequest) -> HttpResponseBase:
        """All of them, by name."""
        cards = await access_models(request.caller)
        if speaks_anthropic(request):
            return json_response(_encode(model_page(cards)))
        return json_response(_encode({"object": "list", "data": list(map(model_object, cards))}))


class ModelView(GatewayView):
    """One model."""

    required_scope = "models:read"

    async def get(self, request: GatewayRequest, model: str) -> HttpResponseBase:
        """404 for one that isn't there, or isn't the caller's."""
        card = await access_model(request.caller, model)
        shown = model_info if speaks_anthropic(request) else model_object
        return json_response(_encode(shown(card)))
