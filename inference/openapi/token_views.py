"""What the document says of the views about token ids, and of vLLM's other doors."""

from __future__ import annotations

from typing import Any

from drf_spectacular.types import OpenApiTypes

from inference.anthropic.schemas import MessagesRequest
from inference.extras import generate
from inference.openai.schemas import ChatRequest, CompletionRequest
from inference.openapi import answers
from inference.openapi.operations import KEY, operation
from inference.pooling import moderations
from inference.responses.schemas import ResponsesRequest
from inference.tokens import render
from inference.tokens.schemas import TokensRequest
from inference.tokens.views import TokensView

VIEWS: dict[Any, dict[str, Any]] = {
    TokensView: {
        "post": operation(
            "Tokens", answers.TokensOut, request=TokensRequest, streams=True, parameters=(KEY,)
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
