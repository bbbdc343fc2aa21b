"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from django.http.response import HttpResponseBase

from engine.errors import InvalidRequest
from inference.generation import Generation, Job, Served, find_served
from inference.openai.chat_answer import ChatAnswer
from inference.openai.chat_options import ChatOptions
from inference.openai.chat_stream import ChatStreamWriter
from inference.openai.schemas import ChatRequest
from inference.openai.serving import parse, renamed, respond
from inference.rendering.messages import template_messages
from inference.rendering.prompts import chat_token_ids, truncated
from inference.web.negotiation import JSON_OR_EVENTS
from inference.web.request_ids import new_id
from inference.web.views import GatewayRequest, GatewayView
from tenants.authentication import Caller


class ChatCompletionsView(GatewayView):
    """Continues a chat, in one answer or as a stream."""

    renderer_classes = JSON_OR_EVENTS

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """One chat completion."""
        body = self.read_json(request)
        chat = parse(ChatRequest, body)
        ignored = chat.ignored_fields()
        served = await find_served(request.caller, chat.model)
        options = ChatOptions.of(chat, served)
        job = await chat_job(
            chat,
            body["messages"],
            served,
            options,
            caller=request.caller,
            received=request.received,
        )
        generation = await Generation.start(job)
        return await respond(
            generation,
            ignored,
            writer=lambda: ChatStreamWriter(generation, options),
            answer=lambda: ChatAnswer(generation, options),
        )


async def chat_job(
    chat: ChatRequest,
    messages: list[dict[str, Any]],
    served: Served,
    options: ChatOptions,
    *,
    caller: Caller,
    received: float,
    endpoint: str = "chat.completions",
) -> Job:
    """The chat rendered, with its sampling. Raises `InvalidRequest`."""
    limit_name = "max_completion_tokens" if chat.max_completion_tokens is not None else "max_tokens"
    names = {"max_tokens": limit_name, "logprobs": "top_logprobs", "prompt": "messages"}
    try:
        sampling = chat.sampling_params(
            served.info.default_sampling,
            max_tokens=chat.output_limit,
            logprobs=chat.logprobs_wanted,
        )
        if options.parser is not None:
            options.parser.prepare(sampling, served.tokenizer)
        token_ids = await chat_token_ids(
            served.tokenizer,
            served.info,
            template_messages(messages, served.tokenizer.chat_template or ""),
            tools=chat.tools_in_use,
            add_generation_prompt=bool(chat.add_generation_prompt),
            continue_final_message=bool(chat.continue_final_message),
            chat_template=chat.chat_template,
            documents=chat.documents,
            **(chat.chat_template_kwargs or {}),
        )
        if chat.add_special_tokens:
            token_ids = with_special_tokens(token_ids, served)
        job = Job(
            request_id=new_id("chatcmpl"),
            endpoint=endpoint,
            caller=caller,
            served=served,
            prompts=[truncated(token_ids, chat.truncate_prompt_tokens)],
            sampling=sampling,
            stream=bool(chat.stream),
            priority=chat.priority or 0,
            cache_salt=chat.cache_salt or "",
            received=received,
        )
        await job.check()
    except InvalidRequest as error:
        raise renamed(error, names) from None
    return job


def with_special_tokens(token_ids: list[int], served: Served) -> list[int]:
    """What the tokeniser puts before a text, unless the template wrote it already."""
    start = served.tokenizer.bos_token_id
    return token_ids if start is None or token_ids[:1] == [start] else [start, *token_ids]
