"""`.../render`: a request as the token ids and parameters that would run, which
`/inference/v1/generate` takes. Nothing is generated.
"""

from __future__ import annotations

from typing import Any

import msgspec
from django.http.response import HttpResponseBase

from engine.contract.errors import InvalidRequest
from engine.contract.sampling_params import SamplingParams
from inference.anthropic.chat import chat_request as chat_of_messages
from inference.anthropic.chat import in_our_words as in_messages_words
from inference.anthropic.schemas import MessagesRequest
from inference.anthropic.views import AnthropicView
from inference.chat.job import chat_job
from inference.generation import Job, find_served
from inference.openai.completions import completion_job
from inference.openai.schemas import ChatRequest, CompletionRequest
from inference.openai.schemas.base import GenerateRequest
from inference.openai.serving import name_ignored, parse_beside
from inference.rendering.pool import beside
from inference.responses.before import conversation
from inference.responses.chat import chat_request as chat_of_response
from inference.responses.chat import in_our_words as in_responses_words
from inference.responses.views import parse_request
from inference.tokens.schemas import SAMPLING
from inference.web.views import GatewayRequest, GatewayView, json_response

_encode = msgspec.json.Encoder().encode


def rendered(job: Job, request: GenerateRequest) -> list[dict[str, Any]]:
    """One body for `/inference/v1/generate` a prompt.

    Raises `InvalidRequest` for prompts that came as vectors.
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
            "model": job.served.name,
            "stream": bool(request.stream),
            "stream_options": options.model_dump(exclude_unset=True) if options else None,
            "cache_salt": request.cache_salt,
            "priority": request.priority or 0,
        }
        for number, prompt in enumerate(job.prompts)
    ]


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """What differs from the defaults, under the names that requests have."""
    told = msgspec.to_builtins(sampling, str_keys=True)
    fields = {name: value for name, value in told.items() if name in SAMPLING}
    # Without one, `/inference/v1/generate` takes all of the context.
    fields["max_tokens"] = sampling.max_tokens
    if sampling.thinking is not None:
        fields["thinking"] = told["thinking"]
    return fields


async def rendered_chat(chat: ChatRequest, request: GatewayRequest) -> dict[str, Any]:
    """A chat's body. Raises `InvalidRequest` in a chat's words."""
    served = await find_served(request.caller, chat.model)
    job, options = await chat_job(
        chat,
        served,
        caller=request.caller,
        received=request.received,
        endpoint="chat.completions",
        id_prefix="chatcmpl",
    )
    parsers = options.parsers
    ended = parsers.thinking is None if parsers.reasoning is not None else None
    return {**rendered(job, chat)[0], "reasoning_ended": ended}


class ChatRenderView(GatewayView):
    """A chat completion's prompt."""

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """Its token ids and parameters."""
        chat = await parse_beside(ChatRequest, self.read_json(request))
        ignored = chat.ignored_fields()
        response = json_response(_encode(await rendered_chat(chat, request)))
        name_ignored(response, ignored)
        return response


class CompletionRenderView(GatewayView):
    """A completion's prompts."""

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """Token ids and parameters of each."""
        completion = await parse_beside(CompletionRequest, self.read_json(request))
        ignored = completion.ignored_fields()
        served = await find_served(request.caller, completion.model)
        job = await completion_job(request, completion, served)
        response = json_response(_encode(rendered(job, completion)))
        name_ignored(response, ignored)
        return response


class ResponseRenderView(GatewayView):
    """A response's prompt."""

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """Its token ids and parameters."""
        wanted = await beside(parse_request, self.read_json(request))
        ignored = wanted.ignored_fields()
        chat = await beside(chat_of_response, wanted, await conversation(request.caller, wanted))
        try:
            response = json_response(_encode(await rendered_chat(chat, request)))
        except InvalidRequest as error:
            raise in_responses_words(error, wanted) from None
        name_ignored(response, ignored)
        return response


class MessagesRenderView(AnthropicView):
    """A message's prompt."""

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """Its token ids and parameters."""
        wanted = await self.parsed(MessagesRequest, request)
        ignored = wanted.ignored_fields()
        try:
            response = json_response(
                _encode(await rendered_chat(await beside(chat_of_messages, wanted), request))
            )
        except InvalidRequest as error:
            raise in_messages_words(error) from None
        name_ignored(response, ignored)
        return response
