"""`POST /v1/responses/compact`: shortens a long conversation, as OpenAI does, to its user's
messages and one item that summarizes the rest.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

from django.conf import settings
from django.http.response import HttpResponseBase
from pydantic import Field, StringConstraints

from common.files import new_id
from engine.contract.errors import InvalidRequest, QuireError
from engine.text.tokenizer import Tokenizer
from inference.api.responses.conversation import KIND, encrypt_summary, load_conversation
from inference.api.responses.conversion import to_stored_items, unsupported_fields
from inference.api.responses.response import response_usage
from inference.api.responses.schemas import InputItem, ResponsesRequest
from inference.api.responses.views import parse_request, start_session
from inference.chat.turn import TurnDelta, build_message
from inference.errors import RequestAborted
from inference.generation.model_resolution import resolve_model
from inference.loop.offload import get_render_pool
from inference.parsers.state_machine import Part
from inference.schemas import objects
from inference.schemas.base import ModelName, RejectedRequest, ShortText, StrictRequest
from inference.serving.respond import add_headers, collect
from inference.web.endpoint_schema import Endpoint, EndpointSchema
from inference.web.views import GatewayRequest, GatewayView, json_response

#: Maximum tokens of a summary, or a quarter of the model's context if that is less.
MAX_TOKENS = 1024
SUMMARY_PROMPT = (
    "Summarise the conversation above for whoever goes on with it: what was asked for, what was "
    "decided or found out, names, numbers and code that will be needed, and what is still open. "
    "Write the summary alone."
)


class EmptySummary(QuireError):
    """The model's answer has no text."""

    status = 503
    code = "no_summary"


class CompactRequest(StrictRequest):
    """A conversation to shorten."""

    model: ModelName | None = None
    input: str | list[InputItem] | None = Field(
        default=None, description="Text, or a list of items."
    )
    instructions: str | None = None
    previous_response_id: Annotated[str, StringConstraints(max_length=100)] | None = None
    prompt_cache_key: ShortText | None = None

    def check(self) -> None:
        """Require an input."""
        if not self.input and self.previous_response_id is None:
            raise InvalidRequest("input must not be empty.", param="input")


class CompactView(GatewayView):
    schema = EndpointSchema(
        "Responses", post=Endpoint("Shorten a conversation", objects.Compaction, CompactRequest)
    )
    generates = True

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """The user's own messages and one item for all the rest; nothing is stored."""
        body = self.read_json(request)
        parsed = await request.ctx.offload(_parsed, body)
        ignored = parsed.ignored_fields()
        served = await resolve_model(request.ctx, parsed.model)
        max_tokens = min(MAX_TOKENS, served.info.max_model_len // 4)
        asking = await request.ctx.offload(_build_summary_chat, parsed, max_tokens)
        _, conversation = await load_conversation(request.ctx, asking)
        asked = await get_render_pool().run_in_thread(
            request.caller.tenant,
            settings.QUIRE.render_timeout_s,
            _recent_user_messages,
            [*conversation.history, *conversation.new_items[:-1]],
            served.tokenizer,
            served.info.max_model_len // 2,
        )
        turn = await start_session(request.ctx, asking)
        parts: list[Part] = []

        def add(delta: TurnDelta) -> None:
            if delta.finish_reason == "abort":
                raise RequestAborted("An operator has aborted this request.")
            parts.extend(delta.parts)

        try:
            await collect(turn, add)
        except BaseException:
            turn.release()
            raise
        summary = (build_message(parts)["content"] or "").strip()
        if not summary:
            raise EmptySummary("The model wrote no summary.")
        item = {
            "id": new_id("cmp_"),
            "type": KIND,
            "encrypted_content": encrypt_summary(summary, request.caller.tenant_id),
        }
        compacted = {
            "id": new_id("resp_"),
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*asked, item],
            "usage": response_usage(turn.usage),
        }
        response = json_response(compacted)
        add_headers(response, turn, ignored + unsupported_fields(turn))
        return response


def _parsed(body: dict[str, Any]) -> CompactRequest:
    try:
        return CompactRequest.model_validate(body)
    except RejectedRequest as refusal:
        raise refusal.error from None


def _recent_user_messages(
    items: list[dict[str, Any]], tokenizer: Tokenizer, max_tokens: int
) -> list[dict[str, Any]]:
    """The user's last messages, verbatim, with at most `max_tokens` tokens together."""
    recent: list[dict[str, Any]] = []
    for item in reversed(items):
        if item.get("type", "message") != "message" or item.get("role") != "user":
            continue
        (message,) = to_stored_items([item])
        text = "".join(str(part.get("text", "")) for part in message["content"])
        max_tokens -= len(tokenizer.encode_as_text(text))
        if max_tokens < 0:
            break
        recent.append(message)
    return recent[::-1]


def _build_summary_chat(parsed: CompactRequest, max_tokens: int) -> ResponsesRequest:
    """A request to summarize the conversation; drops its oldest messages if necessary."""
    items: list[dict[str, Any]] = []
    if isinstance(parsed.input, str):
        items = [{"role": "user", "content": parsed.input}]
    elif parsed.input is not None:
        items = [item.model_dump(exclude_unset=True) for item in parsed.input]
    body = {
        "model": parsed.model,
        "input": [*items, {"role": "user", "content": SUMMARY_PROMPT}],
        "instructions": parsed.instructions,
        "previous_response_id": parsed.previous_response_id,
        "truncation": "auto",
        "max_output_tokens": max_tokens,
        "store": False,
    }
    return parse_request(body)
