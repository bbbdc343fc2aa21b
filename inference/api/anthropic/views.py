"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from typing import Any, TypeVar

from django.http import HttpRequest
from django.http.response import HttpResponseBase

from engine.contract.errors import InvalidRequest
from inference.api.anthropic.conversion import (
    chat_from_messages,
    rename_to_messages_fields,
    unsupported_fields,
)
from inference.api.anthropic.errors import anthropic_error
from inference.api.anthropic.schemas import CountTokensRequest, MessagesRequest, Thinking
from inference.api.anthropic.stream import MessageBuilder, MessageStreamWriter, ThinkingDisplay
from inference.chat.job import prompt_token_ids
from inference.chat.turn import ChatSession
from inference.generation.model_resolution import resolve_model
from inference.schemas import objects
from inference.schemas.base import RejectedRequest
from inference.serving.respond import (
    add_headers,
    collect,
    json_answer,
    stream_response,
)
from inference.web.endpoint_schema import IDEMPOTENCY_KEY, Endpoint, EndpointSchema
from inference.web.responses import JSON_OR_EVENTS
from inference.web.views import GatewayRequest, GatewayView, NotFoundView, json_response

S = TypeVar("S", bound=CountTokensRequest)


class AnthropicView(GatewayView):
    """Renders errors in Anthropic's envelope, and adds its header for the request id."""

    render_error = staticmethod(anthropic_error)
    error_schema = objects.AnthropicErrorAnswer

    async def dispatch(  # type: ignore[override]
        self, request: HttpRequest, *args: Any, **kwargs: Any
    ) -> HttpResponseBase:
        """Dispatch and add `request-id`, which Anthropic's SDKs read."""
        response = await super().dispatch(request, *args, **kwargs)
        response["request-id"] = response["X-Request-Id"]
        return response

    async def parsed(self, schema: type[S], request: GatewayRequest) -> S:
        """The validated body. Raises `InvalidRequest` and pydantic's ValidationError."""
        try:
            return await request.ctx.offload(schema.model_validate, self.read_json(request))
        except RejectedRequest as refusal:
            raise refusal.error from None


class MessagesView(AnthropicView):
    schema = EndpointSchema(
        "Messages",
        post=Endpoint(
            "Answer a conversation",
            objects.AnthropicMessage,
            MessagesRequest,
            streams=True,
            parameters=(IDEMPOTENCY_KEY,),
        ),
    )
    generates = True
    queues_for_model = supports_load_shedding = True
    renderer_classes = JSON_OR_EVENTS

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """One message."""
        parsed = await self.parsed(MessagesRequest, request)
        ignored = parsed.ignored_fields()
        turn = await self._start(request, parsed)
        ignored += unsupported_fields(turn)
        display = _thinking_display(parsed.thinking)
        try:
            response: HttpResponseBase
            if parsed.stream:
                writer = MessageStreamWriter(turn, request.request_id, display=display)
                response = await stream_response(turn, writer)
            else:
                response = await _message_response(turn, display)
        except BaseException:
            turn.release()
            raise
        add_headers(response, turn, ignored)
        return response

    async def _start(self, request: GatewayRequest, parsed: MessagesRequest) -> ChatSession:
        try:
            return await ChatSession.start(
                await request.ctx.offload(chat_from_messages, parsed),
                request.ctx,
                endpoint="messages",
                id_prefix="msg",
            )
        except InvalidRequest as error:
            raise rename_to_messages_fields(error) from None


def _thinking_display(thinking: Thinking | None) -> ThinkingDisplay:
    if thinking is None or thinking.type == "disabled":
        return "none"
    return "blocks" if thinking.display == "omitted" else "all"


async def _message_response(turn: ChatSession, display: ThinkingDisplay) -> HttpResponseBase:
    message = MessageBuilder(turn, display=display)
    await collect(turn, message.add)
    return json_response(message.body())


class CountTokensView(AnthropicView):
    schema = EndpointSchema(
        "Messages",
        post=Endpoint("Count a conversation's tokens", objects.TokenCount, CountTokensRequest),
    )

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`{"input_tokens": ...}`; nothing is generated."""
        parsed = await self.parsed(CountTokensRequest, request)
        ignored = parsed.ignored_fields()
        chat = await request.ctx.offload(chat_from_messages, parsed)
        served = await resolve_model(request.ctx, parsed.model)
        tokens = await prompt_token_ids(chat, served, request.ctx)
        return json_answer({"input_tokens": len(tokens)}, ignored)


class UnknownMessagesView(AnthropicView, NotFoundView):
    """Any other path below `/v1/messages`, with any method."""
