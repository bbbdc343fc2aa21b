"""`POST /v1/completions`."""

from __future__ import annotations

from django.http.response import HttpResponseBase

from engine.contract.errors import InvalidRequest
from engine.contract.prompt_embeds import PromptEmbeds
from engine.contract.sampling_params import SamplingParams, check_context
from inference.errors import UnsupportedField
from inference.generation import Generation, Job, Served, find_served
from inference.generation.field_names import renamed
from inference.openai.completion_answer import CompletionAnswer
from inference.openai.completion_options import CompletionOptions
from inference.openai.completion_stream import CompletionStreamWriter
from inference.openai.load_report import report_load
from inference.openai.schemas import CompletionRequest
from inference.openai.schemas.structured import Constraint
from inference.openai.serving import parse_beside, respond
from inference.rendering.infill import infill_token_ids
from inference.rendering.pool import beside
from inference.rendering.prompts import checked_token_ids, text_token_ids, truncated
from inference.rendering.tensor_file import read_embeds
from inference.web.negotiation import JSON_OR_EVENTS
from inference.web.request_ids import new_id
from inference.web.views import GatewayRequest, GatewayView


class CompletionsView(GatewayView):
    """Completes prompts, in one answer or as a stream."""

    generates = True
    comes_into_queue = refused_early = True
    renderer_classes = JSON_OR_EVENTS

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """One completion request, of one or many prompts."""
        completion = await parse_beside(CompletionRequest, self.read_json(request))
        ignored = completion.ignored_fields()
        served = await find_served(request.caller, completion.model, sticky=completion.sticky)
        served.check_queue(
            request.caller,
            completion.tier(request.caller.max_priority)[0],
            stream=completion.stream,
        )
        job = await completion_job(request, completion, served)
        options = CompletionOptions.of(completion, job)
        generation = await Generation.start(job)
        response = await respond(
            generation,
            ignored,
            writer=lambda: CompletionStreamWriter(generation, options),
            answer=lambda: CompletionAnswer(generation, options),
        )
        await report_load(request, response, served.base)
        return response


async def completion_job(
    request: GatewayRequest, completion: CompletionRequest, served: Served
) -> Job:
    """The prompts as token ids, with their sampling. Raises `InvalidRequest`."""
    try:
        constraint, sampling = await beside(_form, completion, served)
        if completion.echo and completion.logprobs is not None:
            sampling.prompt_logprobs = max(sampling.prompt_logprobs or 0, completion.logprobs)
        embeds = await beside(_embeds, completion, served)
        prompts = [[0] * each.rows for each in embeds]
        if completion.prompts:
            limit = sampling.prompt_limit(served.info.max_model_len)
            prompts += await _token_ids(completion, served, limit)
        job = Job(
            request_id=new_id("cmpl"),
            endpoint="completions",
            caller=request.caller,
            served=served,
            prompts=prompts,
            embeds=[*embeds, *([None] * (len(prompts) - len(embeds)))] if embeds else [],
            sampling=sampling,
            stream=bool(completion.stream),
            priority=completion.tier(request.caller.max_priority)[0],
            cache_salt=completion.cache_salt or "",
            received=request.received,
            field_names=constraint.names,
        )
        await job.check()
    except InvalidRequest as error:
        # `echo` with logprobs asks for the prompt's under the same name.
        raise renamed(error, {"prompt_logprobs": "logprobs"} if completion.echo else {}) from None
    return job


def _form(completion: CompletionRequest, served: Served) -> tuple[Constraint, SamplingParams]:
    """What the output must look like, and how it's drawn. Raises `InvalidRequest`."""
    constraint = completion.constraint()
    return constraint, completion.sampling_params(
        served.info.default_sampling,
        max_tokens=completion.output_limit,
        logprobs=completion.logprobs,
        structured_outputs=constraint.params,
    )


def _embeds(completion: CompletionRequest, served: Served) -> list[PromptEmbeds]:
    """Prompts that came as vectors. Raises `InvalidRequest`."""
    size = served.info.prompt_embeds_size
    if completion.embeds and not size:
        raise UnsupportedField(
            "prompt_embeds aren't accepted: the model's replicas need --enable-prompt-embeds.",
            param="prompt_embeds",
        )
    found: list[PromptEmbeds] = []
    for text in completion.embeds:
        found.append(read_embeds(text, size))
        check_context(found[-1].rows, None, served.info.max_model_len)
    return found


async def _token_ids(
    completion: CompletionRequest, served: Served, limit: int | None
) -> list[list[int]]:
    """Of each prompt; with a limit, as many of its tokens as that."""
    prompts, side = completion.prompts, completion.truncation_side
    special = completion.add_special_tokens is not False
    if completion.suffix:
        return await infill_token_ids(
            served.tokenizer,
            served.info,
            [str(prompt) for prompt in prompts],
            completion.suffix,
            add_special_tokens=special,
        )
    if isinstance(prompts[0], str):
        texts = await text_token_ids(
            served.tokenizer,
            served.info,
            [str(prompt) for prompt in prompts],
            add_special_tokens=special,
            most=served.info.max_model_len if limit is None else None,
        )
        return [truncated(token_ids, limit, side) for token_ids in texts]

    def checked() -> list[list[int]]:
        given: list[list[int]] = [list(prompt) for prompt in prompts]  # type: ignore[arg-type]
        return [
            checked_token_ids(truncated(ids, limit, side), served.info, served.vocab_size)
            for ids in given
        ]

    return await beside(checked)
