"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from typing import Any

import msgspec
from django.http.response import HttpResponseBase

from adapters.cards import access_models, access_target
from catalog.access import ModelCard
from inference.anthropic.models import SpeaksBothView, model_info, model_page, speaks_anthropic
from inference.engine_client import get_engine_client
from inference.web.views import GatewayRequest, json_response

_encode = msgspec.json.Encoder().encode


def model_object(card: ModelCard) -> dict[str, Any]:
    """OpenAI's `model` object, with vLLM's additions; `tasks` is known while it's served.

    An adapter has its base model as `root` and `parent`, and the `digest` that answers.
    """
    info = get_engine_client().fleet.model(card.parent or card.alias_of or card.id)
    shown = {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": card.owned_by,
        "root": card.root,
        "parent": card.parent or None,
        "max_model_len": card.max_model_len,
        "tasks": None if info is None else info.tasks,
    }
    return shown | ({"digest": card.digest} if card.digest else {})


class ModelsView(SpeaksBothView):
    """The models that the caller may use."""

    required_scope = "models:read"

    async def get(self, request: GatewayRequest) -> HttpResponseBase:
        """All of them by name, each followed by its adapters."""
        cards = await access_models(request.caller)
        if speaks_anthropic(request):
            return json_response(_encode(model_page(cards)))
        return json_response(_encode({"object": "list", "data": list(map(model_object, cards))}))


class ModelView(SpeaksBothView):
    """One model."""

    required_scope = "models:read"

    async def get(self, request: GatewayRequest, model: str) -> HttpResponseBase:
        """404 for one that isn't there, or isn't the caller's."""
        card = (await access_target(request.caller, model)).card
        shown = model_info if speaks_anthropic(request) else model_object
        return json_response(_encode(shown(card)))
