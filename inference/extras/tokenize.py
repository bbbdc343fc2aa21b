"""`POST /tokenize` and `POST /detokenize`, as vLLM has them."""

from __future__ import annotations

from typing import Any, Self

import msgspec
from django.http.response import HttpResponseBase
from pydantic import BaseModel, ConfigDict, model_validator

from engine.errors import InvalidRequest
from inference.generation import Served, find_served
from inference.openai.schemas.base import Refused
from inference.openai.schemas.messages import Messages, Tools
from inference.rendering.messages import template_messages
from inference.rendering.prompts import chat_token_ids, checked_token_ids, text_token_ids
from inference.web.views import GatewayRequest, GatewayView, json_response

_encode = msgspec.json.Encoder().encode


class TokenizeRequest(BaseModel):
    """A text (`prompt`) or a chat (`messages`) to tokenise."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise Refused(
                InvalidRequest("Either prompt or messages must be given.", param="prompt")
            )
        return self


class DetokenizeRequest(BaseModel):
    """Token ids to turn into text."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str
    tokens: list[int]


class TokenizeView(GatewayView):
    """Token ids of a text or a chat, as generation would see them."""

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`{"count", "max_model_len", "tokens", "token_strs"}`."""
        body = self.read_json(request)
        wanted = _parse(TokenizeRequest, body)
        served = await find_served(request.caller, wanted.model, task=None)
        tokens = await _tokens(wanted, body, served)
        strings = [served.tokenizer.token_text(token) for token in tokens]
        return json_response(
            _encode(
                {
                    "count": len(tokens),
                    "max_model_len": served.info.max_model_len,
                    "tokens": tokens,
                    "token_strs": strings if wanted.return_token_strs else None,
                }
            )
        )


class DetokenizeView(GatewayView):
    """The text of token ids."""

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`{"prompt": text}`."""
        wanted = _parse(DetokenizeRequest, self.read_json(request))
        served = await find_served(request.caller, wanted.model, task=None)
        tokens = checked_token_ids(wanted.tokens, served.info) if wanted.tokens else []
        text = served.tokenizer.decode(tokens, skip_special_tokens=False)
        return json_response(_encode({"prompt": text}))


def _parse(schema: Any, body: dict[str, Any]) -> Any:
    try:
        return schema.model_validate(body)
    except Refused as refusal:
        raise refusal.error from None


async def _tokens(wanted: TokenizeRequest, body: dict[str, Any], served: Served) -> list[int]:
    if wanted.prompt is not None:
        if not wanted.prompt:
            return []
        (token_ids,) = await text_token_ids(
            served.tokenizer,
            served.info,
            [wanted.prompt],
            add_special_tokens=wanted.add_special_tokens,
        )
        return token_ids
    template = served.tokenizer.chat_template or ""
    return await chat_token_ids(
        served.tokenizer,
        served.info,
        template_messages(body["messages"], template),
        tools=body.get("tools"),
        add_generation_prompt=wanted.add_generation_prompt and not wanted.continue_final_message,
        continue_final_message=wanted.continue_final_message,
    )
