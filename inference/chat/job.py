"""A checked chat request as a `Job`: rendered, with its sampling and its parsers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.contract.errors import InvalidRequest
from engine.contract.messages import ModelInfo
from engine.contract.sampling_params import SamplingParams
from engine.text import Tokenizer
from inference.chat.parsers import ModelParsers, ParserPlan, chat_constraint
from inference.chat.reasoning import (
    counted_thinking,
    prompt_is_inside,
    template_variables,
    thinking_params,
    unfollowed,
)
from inference.errors import renamed
from inference.generation.logprobs import TokenNames
from inference.loop.offload import beside
from inference.rendering.prompts import chat_token_ids, system_first, template_messages, truncated
from inference.request.context import new_id
from inference.request.job import Job, Served
from inference.schemas.chat import ChatRequest
from inference.schemas.sampling import Constraint
from inference.settings import gateway_settings
from tenants.authentication import Caller

# -- What of a chat request shapes its answer, in one place for every form of it.


@dataclass(frozen=True)
class ChatOptions:
    """Attributes:
    role: the answer's. echo: text before it. top_logprobs: None for no log probabilities.
    service_tier, metadata: to be shown with the answer.
    parsers: how reasoning and calls are found in each output.
    unfollowed: fields that this model has no use for.
    asks_tokens: log probabilities are wanted of tokens that the client named.
    """

    n: int
    role: str
    echo: str
    top_logprobs: int | None
    names: TokenNames
    parsers: ParserPlan
    return_token_ids: bool
    include_usage: bool
    continuous_usage: bool
    service_tier: str | None = None
    metadata: dict[str, str] | None = None
    unfollowed: tuple[str, ...] = ()
    asks_tokens: bool = False

    @classmethod
    def of(
        cls, chat: ChatRequest, job: Job, parsers: ParserPlan, unfollowed: tuple[str, ...] = ()
    ) -> ChatOptions:
        """The options of a checked request."""
        last = chat.messages[-1]
        role = gateway_settings().response_role if chat.add_generation_prompt else last.role
        echoes = chat.echo and last.role == role and isinstance(last.content, str)
        return cls(
            n=chat.n or 1,
            role=role,
            echo=str(last.content) if echoes else "",
            top_logprobs=chat.logprobs_wanted,
            names=TokenNames(job.served.tokenizer, as_ids=chat.tokens_as_ids),
            parsers=parsers,
            return_token_ids=bool(chat.return_token_ids),
            include_usage=chat.include_usage,
            continuous_usage=chat.continuous_usage,
            service_tier=chat.tier(job.caller.max_priority)[1],
            metadata=chat.metadata,
            unfollowed=unfollowed,
            asks_tokens=chat.logprob_token_ids is not None,
        )


async def chat_job(
    chat: ChatRequest,
    served: Served,
    *,
    caller: Caller,
    received: float,
    endpoint: str,
    id_prefix: str,
) -> tuple[Job, ChatOptions]:
    """The chat rendered, with its sampling, and what shapes the answer.

    Raises:
        InvalidRequest: with the name of the client's field.
    """
    limit_name = "max_completion_tokens" if chat.max_completion_tokens is not None else "max_tokens"
    names = {"max_tokens": limit_name, "logprobs": "top_logprobs", "prompt": "messages"}
    try:
        parsers, constraint, sampling = await beside(_form, chat, served)
        prompt = await prompt_token_ids(chat, served, generates=True)
        prompt = truncated(
            prompt, sampling.prompt_limit(served.info.max_model_len), chat.truncation_side
        )
        if chat.cuts_any_limit:
            cut_limit(sampling, len(prompt), served.info)
        inside, counted = None, None
        if parsers.reasoning is not None:
            inside = prompt_is_inside(chat, parsers.reasoning, served.tokenizer, prompt)
            counted = counted_thinking(parsers.reasoning, served.tokenizer, inside)
        sampling.thinking = thinking_params(
            chat,
            parsers,
            served.tokenizer,
            inside=inside,
            constrained=sampling.structured_outputs is not None,
            calls=constraint.source == "tools",
            template=served.tokenizer.chat_template or "",
        )
        job = Job(
            request_id=new_id(id_prefix),
            endpoint=endpoint,
            caller=caller,
            served=served,
            prompts=[prompt],
            sampling=sampling,
            kept_tokens=parsers.kept_tokens,
            field_names={**names, **constraint.names},
            stream=bool(chat.stream),
            priority=chat.tier(caller.max_priority)[0],
            cache_salt=chat.cache_salt or "",
            received=received,
        )
        await job.check()
    except InvalidRequest as error:
        raise renamed(error, names) from None
    template = served.tokenizer.chat_template or ""
    ignored = unfollowed(chat, template, parsers.reasoning)
    return job, ChatOptions.of(chat, job, parsers.plan(inside, counted), ignored)


def _form(chat: ChatRequest, served: Served) -> tuple[ModelParsers, Constraint, SamplingParams]:
    """What reads the answer, what it must look like, how it's drawn. Raises `InvalidRequest`."""
    parsers = ModelParsers.of(chat, served)
    constraint = chat_constraint(chat, parsers, served.tokenizer)
    sampling = chat.sampling_params(
        served.info.default_sampling,
        max_tokens=chat.output_limit,
        logprobs=chat.logprobs_wanted,
        structured_outputs=constraint.params,
    )
    return parsers, constraint, sampling


def cut_limit(sampling: SamplingParams, prompt_tokens: int, model: ModelInfo) -> None:
    """Make an output limit that is over the context, or the KV cache, what is left there."""
    if sampling.max_tokens is None:
        return
    room = min(model.max_model_len, model.kv_capacity_tokens or model.max_model_len)
    sampling.max_tokens = max(1, min(sampling.max_tokens, room - prompt_tokens))


async def prompt_token_ids(
    chat: ChatRequest, served: Served, *, generates: bool = False
) -> list[int]:
    """The chat's token ids. `generates`: they are to fit the model's context, unless cut to it.

    Raises: what `chat_token_ids` does.
    """
    variables = template_variables(chat, served.tokenizer.chat_template or "")
    messages = await beside(_messages, chat, served.tokenizer)
    tools = await beside(lambda: chat.tools_in_use)
    whole = generates and not chat.truncate_prompt_tokens
    token_ids = await chat_token_ids(
        served.tokenizer,
        served.info,
        messages,
        tools=tools,
        most_tokens=served.info.max_model_len if whole else None,
        add_generation_prompt=bool(chat.add_generation_prompt),
        continue_final_message=bool(chat.continue_final_message),
        chat_template=chat.chat_template,
        documents=chat.documents,
        **variables,
    )
    return with_special_tokens(token_ids, served) if chat.add_special_tokens else token_ids


def _messages(chat: ChatRequest, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """As the model's template reads them."""
    messages = template_messages(chat.raw_messages, tokenizer.chat_template or "")
    return system_first(messages, tokenizer) if chat.system_anywhere else messages


def with_special_tokens(token_ids: list[int], served: Served) -> list[int]:
    """What the tokeniser puts before a text, unless the template wrote it already."""
    start = served.tokenizer.bos_token_id
    return token_ids if start is None or token_ids[:1] == [start] else [start, *token_ids]
