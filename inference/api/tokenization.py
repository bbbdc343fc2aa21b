"""`.../render`: converts a request to the token ids and parameters that it would run with, in the
form that `/inference/v1/generate` accepts. Nothing is generated.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from django.http.response import HttpResponseBase
from pydantic import Field

from engine.contract.errors import InvalidRequest
from engine.contract.sampling_params import SamplingParams
from inference.api.anthropic.conversion import chat_from_messages, rename_to_messages_fields
from inference.api.anthropic.schemas import MessagesRequest
from inference.api.anthropic.views import AnthropicView
from inference.api.completions import completion_job
from inference.api.responses.conversation import load_conversation
from inference.api.responses.conversion import chat_from_responses, rename_to_responses_fields
from inference.api.responses.schemas import ResponsesRequest
from inference.api.responses.views import parse_request
from inference.api.tokens import SAMPLING
from inference.chat.job import build_chat_job, prompt_token_ids
from inference.errors import rename_error_param
from inference.generation.model_resolution import resolve_model
from inference.rendering.prompts import checked_token_ids, text_token_ids
from inference.request.context import RequestContext
from inference.request.job import Job, ResolvedModel
from inference.schemas import objects
from inference.schemas.base import GenerateRequest, ModelName, StrictRequest
from inference.schemas.chat import ChatRequest, Messages
from inference.schemas.completions import CompletionRequest
from inference.schemas.tools import Tools
from inference.serving.respond import json_answer, parse, parse_offloaded
from inference.web.endpoint_schema import Endpoint, EndpointSchema
from inference.web.views import GatewayRequest, GatewayView


def rendered(job: Job, request: GenerateRequest) -> list[dict[str, Any]]:
    """One body for `/inference/v1/generate` per prompt.

    Raises `InvalidRequest` for prompts that came as embeddings.
    """
    if job.embeds:
        raise InvalidRequest("prompt_embeds have no token ids.", param="prompt_embeds")
    options = request.stream_options
    several = len(job.prompts) > 1
    return [
        {
            "request_id": f"{job.request_id}-{number}" if several else job.request_id,
            "token_ids": prompt,
            "sampling_params": sampling_fields(job.sampling),
            "model": job.model.name,
            "stream": bool(request.stream),
            "stream_options": options.model_dump(exclude_unset=True) if options else None,
            "cache_salt": request.cache_salt,
            "priority": request.priority or 0,
        }
        for number, prompt in enumerate(job.prompts)
    ]


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Sampling parameters that differ from the defaults, by their names in requests."""
    values = msgspec.to_builtins(sampling, str_keys=True)
    fields = {name: value for name, value in values.items() if name in SAMPLING}
    # Without `max_tokens`, `/inference/v1/generate` would use all of the context.
    fields["max_tokens"] = sampling.max_tokens
    if sampling.thinking is not None:
        fields["thinking"] = values["thinking"]
    return fields


async def rendered_chat(chat: ChatRequest, ctx: RequestContext) -> dict[str, Any]:
    """The body for a chat. Raises `InvalidRequest` with a chat's field names."""
    served = await resolve_model(ctx, chat.model)
    job, options = await build_chat_job(
        chat,
        served,
        ctx,
        endpoint="chat.completions",
        id_prefix="chatcmpl",
    )
    parsers = options.parsers
    reasoning_finished = parsers.thinking is None if parsers.reasoning is not None else None
    return {**rendered(job, chat)[0], "reasoning_ended": reasoning_finished}


class ChatRenderView(GatewayView):
    schema = EndpointSchema(
        "Tokens", post=Endpoint("See a conversation's tokens", objects.Rendered, ChatRequest)
    )

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """Its token ids and parameters."""
        chat = await parse_offloaded(request.ctx, ChatRequest, self.read_json(request))
        ignored = chat.ignored_fields()
        return json_answer(await rendered_chat(chat, request.ctx), ignored)


class CompletionRenderView(GatewayView):
    schema = EndpointSchema(
        "Tokens", post=Endpoint("See a prompt's tokens", objects.RenderedPrompts, CompletionRequest)
    )

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """Token ids and parameters of each."""
        completion = await parse_offloaded(request.ctx, CompletionRequest, self.read_json(request))
        ignored = completion.ignored_fields()
        served = await resolve_model(request.ctx, completion.model)
        job = await completion_job(request.ctx, completion, served)
        return json_answer(rendered(job, completion), ignored)


class ResponseRenderView(GatewayView):
    schema = EndpointSchema(
        "Tokens", post=Endpoint("See an input's tokens", objects.Rendered, ResponsesRequest)
    )

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """Its token ids and parameters."""
        parsed = await request.ctx.offload(parse_request, self.read_json(request))
        ignored = parsed.ignored_fields()
        ctx, conversation = await load_conversation(request.ctx, parsed)
        chat = await ctx.offload(chat_from_responses, parsed, conversation)
        try:
            body = await rendered_chat(chat, ctx)
        except InvalidRequest as error:
            raise rename_to_responses_fields(error, parsed) from None
        return json_answer(body, ignored)


class MessagesRenderView(AnthropicView):
    schema = EndpointSchema(
        "Tokens", post=Endpoint("See a conversation's tokens", objects.Rendered, MessagesRequest)
    )

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """Its token ids and parameters."""
        parsed = await self.parsed(MessagesRequest, request)
        ignored = parsed.ignored_fields()
        try:
            chat = await request.ctx.offload(chat_from_messages, parsed)
            body = await rendered_chat(chat, request.ctx)
        except InvalidRequest as error:
            raise rename_to_messages_fields(error) from None
        return json_answer(body, ignored)


#: Fields of `ChatRequest` that affect how a chat is rendered; it validates them.
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


class TokenizeRequest(StrictRequest):
    """A text (`prompt`) or a chat (`messages`) to tokenize.

    `add_special_tokens` is true for a text and false for a chat, whose template adds its own.
    """

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {}

    model: ModelName | None = Field(default=None, description="Model whose tokenizer is used.")
    prompt: str | None = Field(default=None, description="Text to tokenize.")
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
        """Require exactly one of the two."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("Either prompt or messages must be given.", param="prompt")


class DetokenizeRequest(StrictRequest):
    """Token ids to turn into text."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {}

    model: ModelName | None = Field(default=None, description="Model whose tokenizer is used.")
    tokens: list[int]


class TokenizeView(GatewayView):
    """Token ids of a text or a chat, as generation would see them."""

    schema = EndpointSchema(
        "Tokens",
        post=Endpoint("Turn text or a conversation into tokens", objects.Tokens, TokenizeRequest),
    )

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`{"count", "max_model_len", "tokens", "token_strs"}`."""
        body = self.read_json(request)
        parsed = await parse_offloaded(request.ctx, TokenizeRequest, body)
        ignored = parsed.ignored_fields()
        served = await resolve_model(request.ctx, parsed.model, task=None)
        tokens = await _tokens(parsed, body, served, request.ctx)
        # The vocabulary's own spelling shows where words begin.
        strings = [served.tokenizer.id_to_piece(token) for token in tokens]
        return json_answer(
            {
                "count": len(tokens),
                "max_model_len": served.info.max_model_len,
                "tokens": tokens,
                "token_strs": strings if parsed.return_token_strs else None,
            },
            ignored,
        )


class DetokenizeView(GatewayView):
    schema = EndpointSchema(
        "Tokens", post=Endpoint("Turn tokens into text", objects.Text, DetokenizeRequest)
    )

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`{"prompt": text}`."""
        parsed = await parse_offloaded(request.ctx, DetokenizeRequest, self.read_json(request))
        ignored = parsed.ignored_fields()
        served = await resolve_model(request.ctx, parsed.model, task=None)
        tokens: list[int] = []
        if parsed.tokens:
            try:
                tokens = checked_token_ids(parsed.tokens, served.info, served.vocab_size)
            except InvalidRequest as error:
                raise rename_error_param(error, {"prompt": "tokens"}) from None
        text = await request.ctx.offload(served.tokenizer.decode, tokens, skip_special_tokens=False)
        return json_answer({"prompt": text}, ignored)


async def _tokens(
    parsed: TokenizeRequest, body: dict[str, Any], served: ResolvedModel, ctx: RequestContext
) -> list[int]:
    if parsed.prompt is not None:
        if not parsed.prompt:
            return []
        (token_ids,) = await text_token_ids(
            served.tokenizer,
            served.info,
            [parsed.prompt],
            tenant=ctx.caller.tenant,
            add_special_tokens=parsed.add_special_tokens is not False,
        )
        return token_ids
    chat = parse(ChatRequest, {name: body[name] for name in CHAT_FIELDS if name in body})
    return await prompt_token_ids(chat, served, ctx)
