"""vLLM's responses with token ids, in one body or as a stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from django.http.response import HttpResponseBase
from pydantic import Field

from engine.contract.errors import InvalidRequest
from engine.contract.messages import TokenLogprobs
from engine.contract.sampling_params import ReasoningParams
from inference.api.completions import completion_job
from inference.errors import UnsupportedField, as_quire_error
from inference.generation.generation import Generation
from inference.generation.logprobs import (
    best_outputs,
    chat_logprobs,
    prompt_logprobs,
    to_json_float,
)
from inference.generation.model_resolution import check_queue, resolve_model
from inference.generation.output import Collected, OutputDelta, TokenEntry, TokenFormatter
from inference.schemas import objects
from inference.schemas.base import (
    ECTransfers,
    GenerateRequest,
    KVTransferParams,
    ModelName,
    Priority,
    RejectedRequest,
    StreamOptions,
    StrictRequest,
)
from inference.schemas.completions import CompletionRequest
from inference.schemas.sampling import SamplingFields
from inference.serving.kv_transfer import ec_transfer_params, kv_transfer_params
from inference.serving.respond import parse, respond
from inference.serving.stream import DONE, EventWriter
from inference.web.endpoint_schema import IDEMPOTENCY_KEY, Endpoint, EndpointSchema
from inference.web.responses import JSON_OR_EVENTS
from inference.web.views import GatewayRequest, GatewayView

_encode = msgspec.json.Encoder().encode

#: Fields of `sampling_params`; all are a completion's too.
SAMPLING = (
    (SamplingFields.model_fields.keys() - GenerateRequest.model_fields.keys()) | {"logprobs"}
) - {"truncate_prompt_tokens", "truncation_side"}
#: Fields of vLLM's `SamplingParams` without effect here.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "detokenize": (True, False),
    "output_kind": (0, 1, 2),
    "skip_clone": (True, False),
}


class TokensRequest(StrictRequest):
    """One prompt. `sampling_params` are those of `SamplingParams`; without `max_tokens` an output
    may fill the context. `request_id` is the client's own id of the request.
    """

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "content_parts": ([],),
        "features": (),
        "parse_context": (),
        "reasoning_parser_kwargs": ({},),
        "token_offsets": ([],),
    }

    token_ids: Annotated[list[int], Field(min_length=1)]
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    model: ModelName | None = None
    request_id: str | None = None
    return_token_ids: bool | None = False
    output_mode: Literal["tokens", "text"] = "tokens"
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    kv_transfer_params: KVTransferParams | None = None
    ec_transfer_params: ECTransfers | None = None
    priority: Priority | None = 0
    reasoning_ended: bool | None = None

    def thinking(self) -> ReasoningParams | None:
        """Markers of reasoning before a constrained answer, as a rendered chat has them.

        Raises `InvalidRequest`.
        """
        value = self.sampling_params.get("thinking")
        if value is None or self.reasoning_ended:
            return None
        try:
            return msgspec.convert(value, ReasoningParams)
        except msgspec.ValidationError as error:  # its cause is our own error
            cause = error.__cause__ or error
            field = getattr(cause, "param", None) or "thinking"
            raise InvalidRequest(str(cause), param=field) from None

    def completion(self) -> CompletionRequest:
        """Convert to a completion request. Raises `InvalidRequest` with this endpoint's fields."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": self.token_ids,
            "stream": self.stream,
            "cache_salt": self.cache_salt,
            "priority": self.priority,
            "kv_transfer_params": self.kv_transfer_params,
            "ec_transfer_params": self.ec_transfer_params,
            "max_tokens": None,
        }
        if self.stream_options is not None:
            body["stream_options"] = self.stream_options.model_dump(exclude_unset=True)
        try:
            return parse(CompletionRequest, body | self._sampling())
        except ValueError as error:  # from pydantic, with a completion's field names
            quire_error = as_quire_error(error)
            if isinstance(quire_error, InvalidRequest):
                raise rename_error_fields(quire_error) from None
            raise
        except InvalidRequest as error:
            raise rename_error_fields(error) from None

    def _sampling(self) -> dict[str, Any]:
        params = {name: value for name, value in self.sampling_params.items() if value is not None}
        if params.get("detokenize") is False and (self.output_mode == "text" or params.get("stop")):
            what = "output_mode 'text'" if self.output_mode == "text" else "stop"
            raise InvalidRequest(f"{what} needs detokenize.", param="sampling_params.detokenize")
        for name, value in params.items():
            if name not in SAMPLING | {"thinking"} and value not in NEUTRAL.get(name, ()):
                path = f"sampling_params.{name[:100]}"
                raise UnsupportedField(f"'{path}' is not supported.", param=path)
        return {name: value for name, value in params.items() if name in SAMPLING}


def rename_error_fields(error: InvalidRequest) -> InvalidRequest:
    """A completion's error with this endpoint's field name."""
    param = error.param or ""
    head = param.split(".")[0].split("[")[0]
    if head in SAMPLING or head == "thinking":
        error.param = f"sampling_params.{param}"
    elif head == "prompt":
        error.param = f"token_ids{param[len(head) :]}"
    return error


class _Choices:
    """Choices in the requested form: only ids, or also their text."""

    def __init__(self, generation: Generation, request: TokensRequest, alternatives: int | None):
        self._text = request.output_mode == "text"
        self._alternatives = alternatives
        self._asked = generation.job.sampling.logprob_token_ids is not None
        self.names = TokenFormatter(generation.job.model.tokenizer, as_ids=False)

    def choice(
        self,
        index: int,
        text: str,
        token_ids: list[int],
        entries: Sequence[TokenEntry],
        finish_reason: str | None,
        stop_reason: int | str | None,
    ) -> dict[str, Any]:
        """One output, or its new part."""
        body: dict[str, Any] = {
            "index": index,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
            "token_ids": token_ids,
            "logprobs": None,
        }
        if self._text:
            body["text"] = text
        if self._alternatives is not None:
            body["logprobs"] = {"content": self._logprobs(entries, self._alternatives)}
        return body

    def _logprobs(self, entries: Sequence[TokenEntry], top: int) -> list[dict[str, Any]]:
        if self._text:
            return chat_logprobs(entries, self.names, top, asked=self._asked)
        return [
            {
                **_scored(entry.logprobs, 0),
                # Without alternatives it is the token itself, as in vLLM.
                "top_logprobs": [
                    _scored(entry.logprobs, index)
                    for index in range(1, len(entry.logprobs.token_ids)) or (0,)
                ],
            }
            for entry in entries
        ]


def _scored(scores: TokenLogprobs, index: int) -> dict[str, Any]:
    return {
        "token_id": scores.token_ids[index],
        "logprob": to_json_float(scores.logprobs[index]),
        "rank": scores.ranks[index],
    }


class TokensAnswer:
    """Collects increments; `body` is vLLM's object."""

    def __init__(
        self, generation: Generation, request: TokensRequest, alternatives: int | None
    ) -> None:
        self._generation, self._request = generation, request
        self._choices = _Choices(generation, request, alternatives)
        self._outputs = [Collected() for _ in generation.outputs[0]]
        self._scores: list[TokenLogprobs | None] | None = None

    def append(self, increment: OutputDelta) -> None:
        self._outputs[increment.index].append(increment)
        if increment.prompt_logprobs is not None:
            self._scores = increment.prompt_logprobs

    def body(self) -> dict[str, Any]:
        """The complete response."""
        generation, job, request = self._generation, self._generation.job, self._request
        best = best_outputs(generation.outputs[0], job.sampling.n)
        chosen = [self._outputs[index] for index in best]
        return {
            "output_mode": request.output_mode,
            "request_id": request.request_id or job.request_id,
            "model": job.model.name,
            "created": int(job.started_at),
            "choices": [
                self._choices.choice(
                    index, out.text, out.token_ids, out.entries, out.finish_reason, out.stop_reason
                )
                for index, out in enumerate(chosen)
            ],
            "usage": generation.usage.to_openai(),
            "prompt_logprobs": prompt_logprobs(self._scores, self._choices.names),
            "prompt_token_ids": job.prompts[0] if request.return_token_ids else None,
            "kv_transfer_params": kv_transfer_params(generation),
            "ec_transfer_params": ec_transfer_params(generation),
        }


class TokensStreamWriter(EventWriter[OutputDelta]):
    """Stream of chunks that ends with `[DONE]`."""

    def __init__(
        self, generation: Generation, request: TokensRequest, alternatives: int | None
    ) -> None:
        self._generation, self._request = generation, request
        self._choices = _Choices(generation, request, alternatives)
        self._is_first = True

    def write(self, news: Iterable[OutputDelta]) -> bytes:
        """One chunk per output."""
        return b"".join(map(self._write, news))

    def _write(self, increment: OutputDelta) -> bytes:
        options = self._request.stream_options
        continuous = options and options.include_usage and options.continuous_usage_stats
        choice = self._choices.choice(
            increment.index,
            increment.text,
            increment.token_ids,
            increment.entries,
            increment.finish_reason,
            increment.stop_reason,
        )
        return self._chunk([choice], usage=bool(continuous))

    def _chunk(self, choices: list[dict[str, Any]], *, usage: bool) -> bytes:
        job = self._generation.job
        body: dict[str, Any] = {
            "output_mode": self._request.output_mode,
            "request_id": self._request.request_id or job.request_id,
            "choices": choices,
            "usage": self._generation.usage.to_openai() if usage else None,
        }
        if self._is_first:
            returns_prompt = self._request.return_token_ids
            body["prompt_token_ids"] = job.prompts[0] if returns_prompt else None
            self._is_first = False
        return b"data: " + _encode(body) + b"\n\n"

    def finish(self) -> bytes:
        """The usage if requested, and the end marker."""
        options = self._request.stream_options
        usage = options is not None and options.include_usage
        return (self._chunk([], usage=True) if usage else b"") + DONE


class TokensView(GatewayView):
    """Generates token ids from token ids, without tokenizer or chat template."""

    schema = EndpointSchema(
        "Tokens",
        post=Endpoint(
            "Generate token ids from token ids",
            objects.TokenGeneration,
            TokensRequest,
            streams=True,
            parameters=(IDEMPOTENCY_KEY,),
        ),
    )
    generates = True
    queues_for_model = True
    renderer_classes = JSON_OR_EVENTS

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """One prompt, in one answer or as a stream."""
        parsed = await request.ctx.offload(parse_tokens, self.read_json(request))
        ignored = parsed.ignored_fields()
        completion = await request.ctx.offload(parsed.completion)
        served = await resolve_model(request.ctx, parsed.model)
        check_queue(request.ctx, served, parsed.priority)
        try:
            job = await completion_job(request.ctx, completion, served)
            if (thinking := parsed.thinking()) is not None:
                job.sampling = msgspec.structs.replace(job.sampling, thinking=thinking)
                await job.check()
        except InvalidRequest as error:
            raise rename_error_fields(error) from None
        alternatives = job.sampling.logprobs
        generation = await Generation.start(job)
        return await respond(
            generation,
            ignored,
            writer=lambda: TokensStreamWriter(generation, parsed, alternatives),
            answer=lambda: TokensAnswer(generation, parsed, alternatives),
        )


def parse_tokens(body: dict[str, Any]) -> TokensRequest:
    """Raises `InvalidRequest` and pydantic's ValidationError, which both become 400."""
    try:
        return TokensRequest.model_validate(body)
    except RejectedRequest as refusal:
        raise refusal.error from None
