"""What the document says of the views about token ids, and of vLLM's other doors."""

from __future__ import annotations

from typing import Any

from drf_spectacular.types import OpenApiTypes

from inference.api import tokenization as render
from inference.api import vllm_compat as generate
from inference.api.anthropic.schemas import MessagesRequest
from inference.api.pooling import views as moderations
from inference.api.responses.schemas import ResponsesRequest
from inference.api.tokens import TokensRequest, TokensView
from inference.openapi.document import KEY, operation
from inference.schemas import objects as answers
from inference.schemas.chat import ChatRequest
from inference.schemas.completions import CompletionRequest

VIEWS: dict[Any, dict[str, Any]] = {
    TokensView: {
        "post": operation(
            "Tokens",
            answers.TokenGeneration,
            request=TokensRequest,
            streams=True,
            parameters=(KEY,),
        )
    },
    render.ChatRenderView: {
        "post": operation("Tokens", answers.Rendered, request=ChatRequest),
    },
    render.CompletionRenderView: {
        "post": operation("Tokens", answers.RenderedPrompts, request=CompletionRequest),
    },
    render.ResponseRenderView: {
        "post": operation("Tokens", answers.Rendered, request=ResponsesRequest),
    },
    render.MessagesRenderView: {
        "post": operation(
            "Tokens",
            answers.Rendered,
            request=MessagesRequest,
            envelope=answers.AnthropicErrorAnswer,
        ),
    },
    generate.GenerateView: {
        "post": operation(
            "Completions",
            answers.Texts,
            request=CompletionRequest,
            extra={(200, "application/x-ndjson"): OpenApiTypes.STR},
        ),
    },
    moderations.ModerationsView: {
        "post": operation(
            "Pooling",
            answers.Moderation,
            request=moderations.ModerationRequest,
            parameters=(KEY,),
        ),
    },
    generate.InvocationsView: {
        "post": operation(
            "Completions", OpenApiTypes.OBJECT, request=OpenApiTypes.OBJECT, streams=True
        ),
    },
}
