"""Builds a `Job` from a validated chat request: rendered, with its sampling and its parsers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.conf import settings

from engine.contract.errors import InvalidRequest
from engine.contract.messages import ModelInfo
from engine.contract.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer
from inference.chat.parsers import ModelParsers, OutputParserConfig, build_constraint
from inference.chat.reasoning import (
    prompt_opens_reasoning,
    reasoning_counter,
    template_variables,
    thinking_params,
    unsupported_reasoning_fields,
)
from inference.errors import rename_error_param
from inference.generation.output import TokenFormatter
from inference.rendering.documents import insert_documents, insert_pages, read_documents
from inference.rendering.media import ChatPrompt, insert_media_tokens
from inference.rendering.media_pool import MediaOptions
from inference.rendering.media_sources import admit_sources, find_media
from inference.rendering.prompts import (
    chat_token_ids,
    count_chars,
    merge_late_system_messages,
    template_messages,
    truncate_tokens,
)
from inference.request.context import RequestContext
from inference.request.job import Job, ResolvedModel
from inference.schemas.chat import ChatRequest
from inference.schemas.sampling import OutputConstraint


@dataclass(frozen=True)
class ChatOptions:
    """Attributes:
    role: of the response's message. echo_last_message: text before it. top_logprobs: None for no
    log probabilities.
    service_tier, metadata: echoed in the response.
    parsers: how reasoning and calls are parsed from each output.
    unsupported_fields: fields that this model doesn't support.
    wants_tokens: log probabilities are requested for token ids that the client named.
    shows_all_tokens: log probabilities also of tokens that the text leaves out.
    """

    n: int
    role: str
    echo_last_message: str
    top_logprobs: int | None
    names: TokenFormatter
    parsers: OutputParserConfig
    return_token_ids: bool
    include_usage: bool
    continuous_usage: bool
    service_tier: str | None = None
    metadata: dict[str, str] | None = None
    unsupported_fields: tuple[str, ...] = ()
    wants_tokens: bool = False
    shows_all_tokens: bool = False

    @classmethod
    def build(
        cls,
        chat: ChatRequest,
        job: Job,
        parsers: OutputParserConfig,
        unfollowed: tuple[str, ...] = (),
    ) -> ChatOptions:
        """The options of a validated request."""
        last = chat.messages[-1]
        role = settings.QUIRE.response_role if chat.add_generation_prompt else last.role
        echoes = chat.echo and last.role == role and isinstance(last.content, str)
        return cls(
            n=chat.n or 1,
            role=role,
            echo_last_message=str(last.content) if echoes else "",
            top_logprobs=chat.num_logprobs,
            names=TokenFormatter(job.model.tokenizer, as_ids=chat.tokens_as_ids),
            parsers=parsers,
            return_token_ids=bool(chat.return_token_ids),
            include_usage=chat.include_usage,
            continuous_usage=chat.continuous_usage,
            service_tier=chat.resolve_service_tier(job.caller.max_priority)[1],
            metadata=chat.metadata,
            unsupported_fields=unfollowed,
            wants_tokens=chat.logprob_token_ids is not None,
            shows_all_tokens=bool(chat.return_token_ids or chat.tokens_as_ids)
            or not job.sampling.skip_special_tokens,
        )


async def build_chat_job(
    chat: ChatRequest,
    served: ResolvedModel,
    ctx: RequestContext,
    *,
    endpoint: str,
    id_prefix: str,
) -> tuple[Job, ChatOptions]:
    """The job of a rendered chat, and the options that shape its response.

    Raises:
        InvalidRequest: with the name of the client's field.
    """
    limit_name = "max_completion_tokens" if chat.max_completion_tokens is not None else "max_tokens"
    names = {"max_tokens": limit_name, "logprobs": "top_logprobs", "prompt": "messages"}
    try:
        parsers, constraint, sampling = await ctx.offload(_resolve_output_format, chat, served)
        chat_prompt = await render_prompt(chat, served, ctx, generates=True)
        prompt = truncate_tokens(
            chat_prompt.token_ids,
            sampling.prompt_limit(served.info.max_model_len),
            chat.truncation_side,
        )
        if chat_prompt.media and len(prompt) < len(chat_prompt.token_ids):
            raise InvalidRequest(
                "A prompt with media can't be cut.",
                param="truncate_prompt_tokens",
            )
        if chat.cuts_any_limit:
            clamp_max_tokens(sampling, len(prompt), served.info)
        inside, counted = None, None
        if parsers.reasoning is not None:
            inside = prompt_opens_reasoning(chat, parsers.reasoning, served.tokenizer, prompt)
            counted = reasoning_counter(parsers.reasoning, served.tokenizer, inside)
        sampling.thinking = thinking_params(
            chat,
            parsers,
            served.tokenizer,
            in_reasoning=inside,
            constrained=sampling.structured_outputs is not None,
            calls=constraint.source == "tools",
            template=served.tokenizer.chat_template or "",
        )
        job = Job(
            ctx=ctx,
            request_id=ctx.ids.new(id_prefix),
            endpoint=endpoint,
            model=served,
            prompts=[prompt],
            media=[chat_prompt.media] if chat_prompt.media else [],
            media_data=chat_prompt.media_data,
            audio_ms=[chat_prompt.audio_ms] if chat_prompt.audio_ms else [],
            sampling=sampling,
            preserved_token_ids=parsers.preserved_token_ids,
            field_names={**names, **constraint.names},
            stream=bool(chat.stream),
            priority=chat.resolve_service_tier(ctx.caller.max_priority)[0],
            cache_salt=chat.cache_salt or "",
            kv_transfer=chat.kv_transfer_params,
            ec_transfer=chat.ec_transfer_params,
        )
        await job.check()
    except InvalidRequest as error:
        raise rename_error_param(error, names) from None
    template = served.tokenizer.chat_template or ""
    ignored = unsupported_reasoning_fields(chat, template, parsers.reasoning)
    return job, ChatOptions.build(chat, job, parsers.parser_config(inside, counted), ignored)


def _resolve_output_format(
    chat: ChatRequest, served: ResolvedModel
) -> tuple[ModelParsers, OutputConstraint, SamplingParams]:
    """Parsers, output constraint and sampling parameters. Raises `InvalidRequest`."""
    parsers = ModelParsers.resolve(chat, served)
    constraint = build_constraint(chat, parsers, served.tokenizer)
    sampling = chat.sampling_params(
        served.info.default_sampling,
        max_tokens=chat.output_limit,
        logprobs=chat.num_logprobs,
        structured_outputs=constraint.params,
    )
    return parsers, constraint, sampling


def clamp_max_tokens(sampling: SamplingParams, prompt_tokens: int, model: ModelInfo) -> None:
    """Reduce an output limit to what the context or the KV cache has left after the prompt."""
    if sampling.max_tokens is None:
        return
    max_total_tokens = min(model.max_model_len, model.kv_capacity_tokens or model.max_model_len)
    sampling.max_tokens = max(1, min(sampling.max_tokens, max_total_tokens - prompt_tokens))


async def prompt_token_ids(
    chat: ChatRequest, served: ResolvedModel, ctx: RequestContext, *, generates: bool = False
) -> list[int]:
    """The chat's token ids. Arguments and errors are `render_prompt`'s."""
    return (await render_prompt(chat, served, ctx, generates=generates)).token_ids


async def render_prompt(
    chat: ChatRequest, served: ResolvedModel, ctx: RequestContext, *, generates: bool = False
) -> ChatPrompt:
    """Render the chat as a prompt. `generates`: it must fit the model's context, unless truncated.

    Raises: as `admit_sources`, `chat_token_ids`, `read_documents` and `insert_media_tokens`.
    """
    contents = chat.raw_messages
    sources = await ctx.offload(find_media, contents, served.info)
    if sources or chat.mm_processor_kwargs or chat.media_io_kwargs:
        options = MediaOptions.from_chat(chat, served.info)
    if sources:
        sources = await admit_sources(sources, ctx.caller)
        documents = await read_documents(sources, served.info, ctx.caller)
        sources = insert_pages(sources, documents, served.info)
        contents = await ctx.offload(insert_documents, contents, documents)
    variables = template_variables(chat, served.tokenizer.chat_template or "")
    messages = await ctx.offload(_messages, chat, contents, served.tokenizer)
    tools = await ctx.offload(lambda: chat.tools_in_use)
    chars = await ctx.offload(count_chars, (messages, tools, chat.documents))
    must_fit = generates and not chat.truncate_prompt_tokens
    token_ids = await chat_token_ids(
        served.tokenizer,
        served.info,
        messages,
        tenant=ctx.caller.tenant,
        chars=chars,
        tools=tools,
        max_tokens=served.info.max_model_len if must_fit else None,
        add_generation_prompt=bool(chat.add_generation_prompt),
        continue_final_message=bool(chat.continue_final_message),
        chat_template=chat.chat_template,
        documents=chat.documents,
        **variables,
    )
    if chat.add_special_tokens:
        token_ids = add_special_tokens(token_ids, served)
    if not sources:
        return ChatPrompt(token_ids, [], {})
    return await insert_media_tokens(
        token_ids, sources, options, served.info, served.tokenizer, ctx.caller
    )


def _messages(
    chat: ChatRequest, contents: list[dict[str, Any]], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """The messages in the form that the model's template reads."""
    messages = template_messages(contents, tokenizer.chat_template or "")
    return merge_late_system_messages(messages, tokenizer) if chat.system_anywhere else messages


def add_special_tokens(token_ids: list[int], served: ResolvedModel) -> list[int]:
    """Prepend the tokenizer's special tokens unless the template wrote them already."""
    start = served.tokenizer.bos_token_id
    return token_ids if start is None or token_ids[:1] == [start] else [start, *token_ids]
