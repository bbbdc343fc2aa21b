"""`POST /tokenize` and `POST /detokenize`, as vLLM has them."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from django.http.response import HttpResponseBase

from engine.contract.errors import InvalidRequest
from inference.chat.job import prompt_token_ids
from inference.generation import Served, find_served
from inference.generation.field_names import renamed
from inference.openai.schemas import ChatRequest
from inference.openai.schemas.base import ModelName, Refused
from inference.openai.schemas.messages import Messages
from inference.openai.schemas.tools import Tools
from inference.openai.serving import name_ignored, parse
from inference.rendering.pool import beside
from inference.rendering.prompts import checked_token_ids, text_token_ids
from inference.web.known_fields import KnownFields
from inference.web.views import GatewayRequest, GatewayView, json_response

_encode = msgspec.json.Encoder().encode
#: How a chat is rendered: `ChatRequest`'s fields, which check them.
CHAT_FIELDS = (
    "model",
    "messages",
    "tools",
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "media_io_kwargs",
    "mm_processor_kwargs",
)


class TokenizeRequest(KnownFields):
    """A text (`prompt`) or a chat (`messages`) to tokenise.

    `add_special_tokens` is true for a text and false for a chat, whose template has its own.
    """

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {}

    model: ModelName | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = False

    def check(self) -> None:
        """One of the two, not both."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("Either prompt or messages must be given.", param="prompt")


class DetokenizeRequest(KnownFields):
    """Token ids to turn into text."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {}

    model: ModelName | None = None
    tokens: list[int]


class TokenizeView(GatewayView):
    """Token ids of a text or a chat, as generation would see them."""

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`{"count", "max_model_len", "tokens", "token_strs"}`."""
        body = self.read_json(request)
        wanted = await beside(_parse, TokenizeRequest, body)
        ignored = wanted.ignored_fields()
        served = await find_served(request.caller, wanted.model, task=None)
        tokens = await _tokens(wanted, body, served)
        # The vocabulary's own spelling: joined, it says where words begin.
        strings = [served.tokenizer.id_to_piece(token) for token in tokens]
        response = json_response(
            _encode(
                {
                    "count": len(tokens),
                    "max_model_len": served.info.max_model_len,
                    "tokens": tokens,
                    "token_strs": strings if wanted.return_token_strs else None,
                }
            )
        )
        name_ignored(response, ignored)
        return response


class DetokenizeView(GatewayView):
    """The text of token ids."""

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`{"prompt": text}`."""
        wanted = await beside(_parse, DetokenizeRequest, self.read_json(request))
        ignored = wanted.ignored_fields()
        served = await find_served(request.caller, wanted.model, task=None)
        tokens: list[int] = []
        if wanted.tokens:
            try:
                tokens = checked_token_ids(wanted.tokens, served.info, served.vocab_size)
            except InvalidRequest as error:
                raise renamed(error, {"prompt": "tokens"}) from None
        text = await beside(served.tokenizer.decode, tokens, skip_special_tokens=False)
        response = json_response(_encode({"prompt": text}))
        name_ignored(response, ignored)
        return response


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
            add_special_tokens=wanted.add_special_tokens is not False,
        )
        return token_ids
    chat = parse(ChatRequest, {name: body[name] for name in CHAT_FIELDS if name in body})
    return await prompt_token_ids(chat, served)
