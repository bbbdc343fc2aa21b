"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from django.http.response import HttpResponseBase

from engine.contract.errors import InvalidRequest
from engine.contract.messages import MediaItem, PromptEmbeds, TokenLogprobs
from engine.contract.sampling_params import SamplingParams, check_context
from engine.multimodal.encoder_text import EncoderText, EncoderTextProcessor
from inference.errors import UnsupportedField, rename_error_param
from inference.generation.generation import Generation
from inference.generation.logprobs import (
    best_outputs,
    completion_logprobs,
    concat_logprobs,
    echo_logprobs,
    prompt_logprobs,
)
from inference.generation.model_resolution import check_queue, resolve_model
from inference.generation.output import Collected, OutputDelta, TokenFormatter
from inference.generation.record import response_metrics
from inference.rendering.prompt_embeds import read_embeds
from inference.rendering.prompts import (
    checked_token_ids,
    fim_prompt,
    text_token_ids,
    truncate_tokens,
)
from inference.request.context import RequestContext
from inference.request.job import Job, ResolvedModel
from inference.schemas import objects
from inference.schemas.completions import CompletionRequest
from inference.schemas.sampling import OutputConstraint
from inference.serving.kv_transfer import ec_transfer_params, kv_transfer_params
from inference.serving.respond import add_orca_header, parse_offloaded, respond
from inference.serving.stream import DONE, ChunkEncoder, EventWriter
from inference.web.endpoint_schema import IDEMPOTENCY_KEY, Endpoint, EndpointSchema
from inference.web.responses import JSON_OR_EVENTS
from inference.web.views import GatewayRequest, GatewayView


@dataclass(frozen=True)
class CompletionOptions:
    """Attributes:
    n: outputs to return for each prompt.
    echoes: [num_prompts] the prompts as texts, or [] without `echo`.
    logprobs: alternatives per token, None for no log probabilities.
    service_tier, metadata: echoed in the response.
    shows_output: False if only the prompt was to be scored.
    echoes_ids: the prompts came as token ids: special tokens are part of the echo.
    """

    n: int
    echoes: list[str]
    logprobs: int | None
    names: TokenFormatter
    shows_output: bool
    return_token_ids: bool
    include_usage: bool
    continuous_usage: bool
    shows_prompt_logprobs: bool
    service_tier: str | None = None
    metadata: dict[str, str] | None = None
    echoes_ids: bool = False

    @classmethod
    def of(cls, completion: CompletionRequest, job: Job) -> CompletionOptions:
        """The options of a validated request."""
        echoes = []
        has_token_ids = bool(completion.prompts) and not isinstance(completion.prompts[0], str)
        if completion.echo:
            tokenizer = job.model.tokenizer
            for prompt, token_ids in zip(completion.prompts, job.prompts, strict=True):
                echoes_text = not has_token_ids and completion.truncate_prompt_tokens is None
                echo = (
                    str(prompt) if echoes_text else tokenizer.decode(token_ids, not has_token_ids)
                )
                echoes.append(echo)
        return cls(
            n=completion.n or 1,
            echoes=echoes,
            logprobs=completion.logprobs,
            names=TokenFormatter(job.model.tokenizer, as_ids=completion.tokens_as_ids),
            shows_output=not completion.is_scoring_request,
            return_token_ids=bool(completion.return_token_ids),
            include_usage=completion.include_usage,
            continuous_usage=completion.continuous_usage,
            shows_prompt_logprobs=completion.prompt_logprobs is not None,
            service_tier=completion.resolve_service_tier(job.caller.max_priority)[1],
            metadata=completion.metadata,
            echoes_ids=has_token_ids,
        )

    def echo(self, number: int) -> str:
        """Text that is echoed before a prompt's outputs."""
        return self.echoes[number] if self.echoes else ""

    def echo_logprobs(
        self, prompt: list[int], scores: list[TokenLogprobs | None] | None
    ) -> dict[str, Any] | None:
        """The echoed prompt's log probabilities, if both are requested."""
        if not self.echoes or self.logprobs is None or scores is None:
            return None
        return echo_logprobs(prompt, scores, self.names, shows_special=self.echoes_ids)


class CompletionBuilder:
    """Collects increments; `body` is OpenAI's object. Choices are in the order of the prompts."""

    def __init__(self, generation: Generation, options: CompletionOptions) -> None:
        self._generation, self._options = generation, options
        self._outputs = [[Collected() for _ in outputs] for outputs in generation.outputs]
        self._scores: dict[int, list[TokenLogprobs | None]] = {}

    def append(self, increment: OutputDelta) -> None:
        self._outputs[increment.number][increment.index].append(increment)
        if increment.prompt_logprobs is not None:
            self._scores[increment.number] = increment.prompt_logprobs

    def body(self) -> dict[str, Any]:
        """The `text_completion` object."""
        generation, job = self._generation, self._generation.job
        choices: list[dict[str, Any]] = []
        for number, outputs in enumerate(self._outputs):
            for index in best_outputs(generation.outputs[number], self._options.n):
                choices.append(self._choice(len(choices), number, outputs[index]))
        usage = generation.usage
        if not self._options.shows_output:
            usage.completion_tokens = 0
        body: dict[str, Any] = {
            "id": job.request_id,
            "object": "text_completion",
            "created": int(job.started_at),
            "model": job.model.name,
            "choices": choices,
            "usage": usage.to_openai(),
            "service_tier": self._options.service_tier,
            "system_fingerprint": job.model.fingerprint,
            "kv_transfer_params": kv_transfer_params(generation),
            "ec_transfer_params": ec_transfer_params(generation),
        }
        body |= response_metrics(generation.flights)
        if self._options.metadata is not None:
            body["metadata"] = self._options.metadata
        return body

    def _choice(self, index: int, number: int, output: Collected) -> dict[str, Any]:
        options, prompt = self._options, self._generation.job.prompt_token_ids(number)
        echo, shows_output = options.echo(number), options.shows_output
        scores = self._scores.get(number)
        choice: dict[str, Any] = {
            "index": index,
            "text": echo + (output.text if shows_output else ""),
            "logprobs": None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason if shows_output else None,
            "token_ids": None,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
        }
        if options.logprobs is not None:
            output_logprobs = completion_logprobs(
                output.entries if shows_output else [], options.names, len(echo)
            )
            choice["logprobs"] = concat_logprobs(
                options.echo_logprobs(prompt, scores), output_logprobs
            )
        if options.shows_prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(scores, options.names)
        if options.return_token_ids:
            choice["token_ids"] = output.token_ids if shows_output else []
            choice["prompt_token_ids"] = prompt or None
        return choice


_TEXT_PLACEHOLDER = '"\\u0000text"'
_TEXT_MARK = "\0text"


class CompletionStreamWriter(EventWriter[OutputDelta]):
    """OpenAI's streamed `text_completion`s. A choice's first text includes the echo."""

    def __init__(self, generation: Generation, options: CompletionOptions) -> None:
        job = generation.job
        self._generation, self._options = generation, options
        head = {
            "id": job.request_id,
            "object": "text_completion",
            "created": int(job.started_at),
            "model": job.model.name,
            "system_fingerprint": job.model.fingerprint,
        }
        self._chunks = ChunkEncoder(
            head,
            generation,
            usage=options.include_usage,
            continuous=options.continuous_usage,
        )
        self._started: set[int] = set()
        self._is_text_only = (
            options.logprobs is None and not options.return_token_ids and options.shows_output
        )

    def write(self, increments: Iterable[OutputDelta]) -> bytes:
        """Chunks for new increments."""
        return b"".join(map(self._write, increments))

    def _write(self, increment: OutputDelta) -> bytes:
        options = self._options
        index = increment.number * options.n + increment.index
        first = index not in self._started
        self._started.add(index)
        text = increment.text if options.shows_output else ""
        if first:
            text = options.echo(increment.number) + text
        if self._is_text_only and increment.finish_reason is None:
            return (
                self._chunks.text(index, text, self._text_choice, _TEXT_PLACEHOLDER)
                if text
                else b""
            )
        choice = self._choice(index, text)
        choice["finish_reason"] = increment.finish_reason
        if options.shows_output:
            choice["stop_reason"] = increment.stop_reason
        self._add_tokens(choice, increment, first)
        return self._chunks.choice(choice)

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
            "token_ids": None,
            "prompt_token_ids": None,
        }

    def _text_choice(self, index: int) -> dict[str, Any]:
        return self._choice(index, _TEXT_MARK)

    def _add_tokens(self, choice: dict[str, Any], increment: OutputDelta, first: bool) -> None:
        """Add log probabilities and token ids, as far as they are requested."""
        options = self._options
        prompt = self._generation.job.prompt_token_ids(increment.number)
        entries = increment.entries if options.shows_output else []
        if options.logprobs is not None:
            start = len(options.echo(increment.number))
            output_logprobs = completion_logprobs(entries, options.names, start)
            echo = options.echo_logprobs(prompt, increment.prompt_logprobs) if first else None
            choice["logprobs"] = concat_logprobs(echo, output_logprobs)
        if options.return_token_ids:
            choice["token_ids"] = increment.token_ids if options.shows_output else []
            if first:
                choice["prompt_token_ids"] = prompt or None

    def finish(self) -> bytes:
        """The usage if requested, and the end marker."""
        return self._chunks.final_usage() + DONE


class CompletionsView(GatewayView):
    schema = EndpointSchema(
        "Completions",
        post=Endpoint(
            "Complete a prompt",
            objects.Completion,
            CompletionRequest,
            streams=True,
            parameters=(IDEMPOTENCY_KEY,),
        ),
    )
    generates = True
    queues_for_model = supports_load_shedding = True
    renderer_classes = JSON_OR_EVENTS

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """One completion request, of one or many prompts."""
        completion = await parse_offloaded(request.ctx, CompletionRequest, self.read_json(request))
        ignored = completion.ignored_fields()
        served = await resolve_model(request.ctx, completion.model, sticky=completion.sticky_key)
        check_queue(
            request.ctx,
            served,
            completion.resolve_service_tier(request.caller.max_priority)[0],
            stream=completion.stream,
        )
        job = await completion_job(request.ctx, completion, served)
        options = CompletionOptions.of(completion, job)
        generation = await Generation.start(job)
        response = await respond(
            generation,
            ignored,
            writer=lambda: CompletionStreamWriter(generation, options),
            answer=lambda: CompletionBuilder(generation, options),
        )
        await add_orca_header(request, response, served.base)
        return response


async def completion_job(
    ctx: RequestContext, completion: CompletionRequest, served: ResolvedModel
) -> Job:
    """The job of a request, with prompts as token ids. Raises `InvalidRequest`."""
    try:
        constraint, sampling = await ctx.offload(_form, completion, served)
        if completion.echo and completion.logprobs is not None:
            sampling.prompt_logprobs = max(sampling.prompt_logprobs or 0, completion.logprobs)
        embeds = await ctx.offload(_embeds, completion, served)
        prompts = [[0] * embed.rows for embed in embeds]
        info, texts = served.info, list[EncoderText]()
        if completion.forced_bos_token_id is not None and not info.max_encoder_tokens:
            raise UnsupportedField(
                f"The model {info.name} has no encoder that reads prompts.",
                param="forced_bos_token_id",
            )
        if completion.prompts:
            limit = sampling.prompt_limit(info.max_model_len)
            if info.max_encoder_tokens and sampling.truncate_prompt_tokens == -1:
                limit = info.max_encoder_tokens  # outputs take nothing of an encoder's context
            prompts += await _token_ids(ctx, completion, served, limit)
        encoder_tokens = list(map(len, prompts)) if info.max_encoder_tokens else []
        if encoder_tokens:
            prompts, texts = await ctx.offload(_for_encoder, completion, served, prompts)
        job = Job(
            ctx=ctx,
            request_id=ctx.ids.new("cmpl"),
            endpoint="completions",
            model=served,
            prompts=prompts,
            embeds=[*embeds, *([None] * (len(prompts) - len(embeds)))] if embeds else [],
            media=[[MediaItem(text.kind, text.digest, ())] for text in texts],
            media_data={text.digest: text.encoded for text in texts},
            encoder_tokens=encoder_tokens,
            sampling=sampling,
            stream=bool(completion.stream),
            priority=completion.resolve_service_tier(ctx.caller.max_priority)[0],
            cache_salt=completion.cache_salt or "",
            kv_transfer=completion.kv_transfer_params,
            ec_transfer=completion.ec_transfer_params,
            field_names=constraint.names,
        )
        await job.check()
    except InvalidRequest as error:
        # With `echo`, the field for log probabilities also requests those of the prompt.
        raise rename_error_param(
            error, {"prompt_logprobs": "logprobs"} if completion.echo else {}
        ) from None
    return job


def _form(
    completion: CompletionRequest, served: ResolvedModel
) -> tuple[OutputConstraint, SamplingParams]:
    """Output constraint and sampling parameters. Raises `InvalidRequest`."""
    constraint = completion.constraint()
    return constraint, completion.sampling_params(
        served.info.default_sampling,
        max_tokens=completion.output_limit,
        logprobs=completion.logprobs,
        structured_outputs=constraint.params,
    )


def _for_encoder(
    completion: CompletionRequest, served: ResolvedModel, token_ids: list[list[int]]
) -> tuple[list[list[int]], list[EncoderText]]:
    """Prompts of a model whose encoder reads the given ones: what outputs begin with, and the
    encoder's texts. Raises `InvalidRequest`.
    """
    for field, is_set in (
        ("suffix", completion.suffix),
        ("echo", completion.echo),
        ("prompt_embeds", completion.embeds),
    ):
        if is_set:
            raise UnsupportedField(
                f"{field} can't be used: an encoder reads the prompt.", param=field
            )
    info, forced = served.info, completion.forced_bos_token_id
    start_ids = tuple(info.decoder_start_ids)
    if forced is not None:
        if forced >= info.vocab_size:
            raise InvalidRequest(
                f"forced_bos_token_id must be below {info.vocab_size}; got {forced}.",
                param="forced_bos_token_id",
            )
        start_ids = start_ids[0], forced
    processor = EncoderTextProcessor(start_ids, info.max_encoder_tokens, info.vocab_size)
    return [processor.begin() for _ in token_ids], [processor.prepare(ids) for ids in token_ids]


def _embeds(completion: CompletionRequest, served: ResolvedModel) -> list[PromptEmbeds]:
    """Prompts that came as embeddings. Raises `InvalidRequest`."""
    size = served.info.prompt_embeds_size
    if completion.embeds and not size:
        raise UnsupportedField(
            "prompt_embeds aren't accepted: the model's replicas need --enable-prompt-embeds.",
            param="prompt_embeds",
        )
    embeds: list[PromptEmbeds] = []
    for text in completion.embeds:
        embeds.append(read_embeds(text, size))
        check_context(embeds[-1].rows, None, served.info.max_model_len)
    return embeds


async def _token_ids(
    ctx: RequestContext, completion: CompletionRequest, served: ResolvedModel, limit: int | None
) -> list[list[int]]:
    """Token ids of each prompt, truncated to `limit`."""
    prompts, side = completion.prompts, completion.truncation_side
    special = completion.add_special_tokens is not False
    if completion.suffix:
        return await fim_prompt(
            served.tokenizer,
            served.info,
            [str(prompt) for prompt in prompts],
            completion.suffix,
            tenant=ctx.caller.tenant,
            add_special_tokens=special,
        )
    if isinstance(prompts[0], str):
        texts = await text_token_ids(
            served.tokenizer,
            served.info,
            [str(prompt) for prompt in prompts],
            tenant=ctx.caller.tenant,
            add_special_tokens=special,
            limit=served.info.prompt_context if limit is None else None,
        )
        return [truncate_tokens(token_ids, limit, side) for token_ids in texts]

    def checked() -> list[list[int]]:
        token_ids: list[list[int]] = [list(prompt) for prompt in prompts]  # type: ignore[arg-type]
        return [
            checked_token_ids(truncate_tokens(ids, limit, side), served.info, served.vocab_size)
            for ids in token_ids
        ]

    return await ctx.offload(checked)
