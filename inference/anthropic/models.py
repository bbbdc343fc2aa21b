"""What clients of OpenAI's and of Anthropic's both ask for: `/v1/models`, and what isn't there.

Anthropic's SDKs name the version of their API in a header.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from django.http import HttpRequest, HttpResponse

from catalog.access import ModelCard
from inference.anthropic.errors import anthropic_error
from inference.web.views import GatewayRequest, GatewayView, NotFoundView


def speaks_anthropic(request: HttpRequest) -> bool:
    """Whether the client is one of Anthropic's."""
    return "HTTP_ANTHROPIC_VERSION" in request.META


class SpeaksBothView(GatewayView):
    """Tells errors as the client's SDK reads them."""

    def error_to(self, request: GatewayRequest, error: Exception) -> HttpResponse:
        """See `GatewayView`."""
        if speaks_anthropic(request):
            return anthropic_error(error, request.request_id)
        return super().error_to(request, error)


class UnknownPathView(SpeaksBothView, NotFoundView):
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
    """All of them on one page."""
    data = [model_info(card) for card in cards]
    return {
        "data": data,
        "has_more": False,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }
