"""`POST /v1/responses/compact`: a long conversation made short, as OpenAI does: what its user said,
and one item for all the rest.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
from django.http.response import HttpResponseBase
from pydantic import StringConstraints

from common.files import new_id
from engine.contract.errors import InvalidRequest, QuireError
from engine.text import Tokenizer
from inference.api.responses.conversation import KIND, conversation, sealed
from inference.api.responses.conversion import kept_items, unfollowed
from inference.api.responses.response import response_usage
from inference.api.responses.schemas import InputItem, ResponsesRequest
from inference.api.responses.views import parse_request, start_turn
from inference.chat.turn import TurnDelta, message_of
from inference.errors import RequestAborted
from inference.generation.model_resolution import find_served
from inference.loop.offload import beside, render_pool
from inference.parsers.state_machine import Part
from inference.schemas.base import KnownFields, Label, ModelName, Refused
from inference.serving.respond import add_headers, collect
from inference.settings import gateway_settings
from inference.web.views import GatewayRequest, GatewayView, json_response

_encode = msgspec.json.Encoder().encode
#: Of a summary: the least of this and a quarter of the model's context.
MAX_TOKENS = 1024
ASK = (
    "Summarise the conversation above for whoever goes on with it: what was asked for, what was "
    "decided or found out, names, numbers and code that will be needed, and what is still open. "
    "Write the summary alone."
)


class NoSummary(QuireError):
    """The model's answer has no text."""

    status = 503
    code = "no_summary"


class CompactRequest(KnownFields):
    """A conversation to make short."""

    model: ModelName | None = None
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, StringConstraints(max_length=100)] | None = None
    prompt_cache_key: Label | None = None

    def check(self) -> None:
        """There must be something."""
        if not self.input and self.previous_response_id is None:
            raise InvalidRequest("input must not be empty.", param="input")


class CompactView(GatewayView):
    """A conversation made short by its model."""

    generates = True

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """The user's own messages and one item for all the rest; nothing is kept."""
        body = self.read_json(request)
        wanted = await beside(_parsed, body)
        ignored = wanted.ignored_fields()
        served = await find_served(request.caller, wanted.model)
        most = min(MAX_TOKENS, served.info.max_model_len // 4)
        asking = await beside(_asking, wanted, most)
        said = await conversation(request.caller, asking)
        asked = await render_pool().run_in_thread(
            gateway_settings().render_timeout_s,
            _user_messages,
            [*said.before, *said.now[:-1]],
            served.tokenizer,
            served.info.max_model_len // 2,
        )
        turn = await start_turn(request.caller, asking, request.received)
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
        summary = (message_of(parts)["content"] or "").strip()
        if not summary:
            raise NoSummary("The model wrote no summary.")
        item = {
            "id": new_id("cmp_"),
            "type": KIND,
            "encrypted_content": sealed(summary, request.caller.tenant_id),
        }
        compacted = {
            "id": new_id("resp_"),
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*asked, item],
            "usage": response_usage(turn.usage),
        }
        response = json_response(_encode(compacted))
        add_headers(response, turn, ignored + unfollowed(turn))
        return response


def _parsed(body: dict[str, Any]) -> CompactRequest:
    try:
        return CompactRequest.model_validate(body)
    except Refused as refusal:
        raise refusal.error from None


def _user_messages(
    items: list[dict[str, Any]], tokenizer: Tokenizer, room: int
) -> list[dict[str, Any]]:
    """The last of the user's messages, word for word, as many as have `room` tokens together."""
    kept: list[dict[str, Any]] = []
    for item in reversed(items):
        if item.get("type", "message") != "message" or item.get("role") != "user":
            continue
        (message,) = kept_items([item])
        text = "".join(str(part.get("text", "")) for part in message["content"])
        room -= len(tokenizer.encode_plain(text))
        if room < 0:
            break
        kept.append(message)
    return kept[::-1]


def _asking(wanted: CompactRequest, most: int) -> ResponsesRequest:
    """The conversation and the wish for its summary; the oldest goes where not all fits."""
    items: list[dict[str, Any]] = []
    if isinstance(wanted.input, str):
        items = [{"role": "user", "content": wanted.input}]
    elif wanted.input is not None:
        items = [item.model_dump(exclude_unset=True) for item in wanted.input]
    body = {
        "model": wanted.model,
        "input": [*items, {"role": "user", "content": ASK}],
        "instructions": wanted.instructions,
        "previous_response_id": wanted.previous_response_id,
        "truncation": "auto",
        "max_output_tokens": most,
        "store": False,
    }
    return parse_request(body)
