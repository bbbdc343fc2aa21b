"""`PoolingJob`: a validated request to a pooling model, and `PoolingRun`, which runs it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from django.http.response import HttpResponse, HttpResponseBase

from engine.contract.errors import EngineFault, InvalidRequest
from engine.contract.messages import EngineRequest
from engine.contract.pooling_params import PoolingParams, Vectors, from_bytes
from engine.contract.sampling_params import SamplingParams
from engine.contract.validation import check_task
from inference.api.pooling.inputs import Entry
from inference.api.pooling.schemas import PoolingBody
from inference.engine_client.mailbox import TokenChunk
from inference.errors import rename_error_param
from inference.generation.generation import Generation
from inference.generation.model_resolution import check_queue, resolve_model
from inference.generation.output import OutputDelta, OutputState
from inference.generation.takeover import TakenOverStream
from inference.loop.offload import get_render_pool
from inference.request.job import Job, ResolvedModel, Usage
from inference.serving.respond import add_headers
from inference.web.views import GatewayRequest, json_response
from metering.access import Admission

_encode = msgspec.json.Encoder().encode

ELEMENT_BYTES = 4
#: Maximum size of all vectors in one answer.
MAX_RESULT_BYTES = 48 << 20


@dataclass(kw_only=True)
class PoolingJob(Job):
    """Prompts to pool; nothing is generated from them.

    Attributes:
        pooling: [num_prompts] pooling parameters of each.
    """

    generates = False

    pooling: list[PoolingParams] = field(default_factory=list)

    @property
    def max_output_tokens(self) -> int:
        """There is no output."""
        return 0

    def ledger_expectation(self) -> dict[str, Any]:
        """The task and the requested vector length; there is no sampling."""
        first = self.pooling[0]
        expectation = {"task": first.task or self.endpoint, "dimensions": first.dimensions}
        return {name: value for name, value in expectation.items() if value is not None}

    async def check(self) -> None:
        """Raise `InvalidRequest` for what could never run, before anything is reserved or sent."""
        info = self.model.info
        facts = info.pooling
        for params in self.pooling:
            params.check_against_model(
                model=self.model.name,
                tasks=info.tasks,
                embedding_size=facts.embedding_size if facts is not None else 0,
                matryoshka=facts.matryoshka if facts is not None else None,
            )
        self._check_size(facts.embedding_size if facts is not None else 0)
        self.check_context()
        self.check_priority()

    def _check_size(self, width: int) -> None:
        """Limit the result's size: vectors of every token are much larger than the text."""
        elements = sum(
            (params.dimensions or width) * (len(prompt) if params.by_token else 1)
            for prompt, params in zip(self.prompts, self.pooling, strict=True)
        )
        if elements * ELEMENT_BYTES > MAX_RESULT_BYTES:
            raise InvalidRequest(
                f"The answer would have {elements * ELEMENT_BYTES} bytes of vectors; at most "
                f"{MAX_RESULT_BYTES} may be asked for at once.",
                param="prompt",
            )

    def engine_requests(self, reserved_tokens: int | None = None) -> Iterator[EngineRequest]:
        """One lazy request per prompt."""
        requests = super().engine_requests(reserved_tokens)
        return (
            msgspec.structs.replace(request, pooling=params)
            for request, params in zip(requests, self.pooling, strict=True)
        )


class PoolingRun(Generation):
    """A running job whose outputs are vectors: admitted, metered and moved between replicas like
    every generation.
    """

    def __init__(
        self,
        job: PoolingJob,
        admission: Admission,
        outputs: list[list[OutputState]],
        taken_over: TakenOverStream | None = None,
    ) -> None:
        self.results: list[bytes] = [b""] * len(job.prompts)
        super().__init__(job, admission, outputs, taken_over)

    def _apply_chunk(self, chunk: TokenChunk) -> OutputDelta | None:
        if chunk.pooled is not None:
            self.results[chunk.number] = chunk.pooled
        return super()._apply_chunk(chunk)

    def _record_latency(self, num_tokens: int) -> None:
        """Record nothing: there is no first token."""

    async def result(self) -> list[bytes]:
        """All results, little-endian float32, in the order of the prompts.

        Raises: errors of the engine or the gateway. The run is released in any case.
        """
        try:
            while not self.finished:
                await self.next()
        finally:
            self.release()
        if not all(self.results):
            raise EngineFault("The engine gave no result for a prompt.")
        return self.results

    @property
    def usage(self) -> Usage:
        """The prompts' tokens; there are no others."""
        return Usage(
            prompt_tokens=self.job.prompt_tokens,
            cached_tokens=sum(self._cached),
            image_tokens=self.job.image_tokens,
            audio_tokens=self.job.audio_tokens,
        )


BuildItem = Callable[[list[Vectors]], dict[str, Any]]
BuildResponse = Callable[[list[Vectors], dict[str, Any]], HttpResponse]


@dataclass(frozen=True, slots=True)
class PoolingRequestHandler:
    """Handles one request.

    Attributes:
        endpoint: for the ledger, and the prefix of the response's id.
        param: the client's field with the prompts.
    """

    request: GatewayRequest
    body: PoolingBody
    served: ResolvedModel
    endpoint: str
    param: str

    async def build_entries(self, entries: Awaitable[list[Entry]]) -> list[Entry]:
        """Await `entries`; errors about prompts name the client's field."""
        try:
            return await entries
        except InvalidRequest as error:
            raise rename_error_param(error, {"prompt": self.param}) from None

    async def answer(
        self, entries: list[Entry], make: BuildItem, pack: BuildResponse | None = None
    ) -> HttpResponseBase:
        """Run the entries and respond with `make(results)`, plus id, model and usage; or with
        `pack(results, these)` unchanged.

        A result is float32 [size], or [num_tokens, size] for token-wise tasks.

        Raises: errors of the limits, the gateway or the engine.
        """
        job = PoolingJob(
            ctx=self.request.ctx,
            request_id=self.request.ctx.ids.new(self.endpoint),
            endpoint=self.endpoint,
            model=self.served,
            prompts=[entry.token_ids for entry in entries],
            sampling=SamplingParams(),
            priority=self.body.priority or 0,
            cache_salt=self.body.cache_salt or "",
            field_names={"prompt": self.param},
            pooling=[entry.params for entry in entries],
            media=[[*entry.media] for entry in entries] if any(e.media for e in entries) else [],
            media_data={digest: data for e in entries for digest, data in e.media_data.items()},
        )
        try:
            await job.check()
        except InvalidRequest as error:
            raise rename_error_param(error, job.field_names) from None
        ignored = self.body.ignored_fields()
        run = await PoolingRun.start(job)
        raw = await run.result()
        rows = [len(e.token_ids) if e.params.by_token else None for e in entries]
        results = list(map(from_bytes, raw, rows))

        def response_of() -> HttpResponse:
            common = {
                "id": job.request_id,
                "created": int(job.started_at),
                "model": self.served.name,
                "usage": run.usage.to_openai(),
            }
            if pack is not None:
                return pack(results, common)
            return json_response(encoded_by_entry(common | make(results)))

        # Many vectors of decimal floats are long: encoding them would block the event loop.
        response = await get_render_pool().run(
            self.request.caller.tenant, sum(map(len, raw)), response_of
        )
        add_headers(response, run, ignored)
        return response


def encoded_by_entry(body: dict[str, Any]) -> bytes:
    """Encode the body as JSON, the entries of its lists one by one.

    The encoder holds the interpreter's lock while it runs: encoding 48 MiB of vectors at once would
    stop all streams for seconds.
    """
    fields = (_encode(name) + b":" + _entries(value) for name, value in body.items())
    return b"{" + b",".join(fields) + b"}"


def _entries(value: Any) -> bytes:
    return b"[" + b",".join(map(_encode, value)) + b"]" if type(value) is list else _encode(value)


async def start_request(
    request: GatewayRequest, body: PoolingBody, endpoint: str, param: str, task: str
) -> PoolingRequestHandler:
    """Start a request, for a model that does `task` ("" for any pooling task).

    Raises: `InvalidRequest` naming the model's tasks; `ModelNotFound`; `EngineOverloaded` (429) or
    `Overloaded` (503) when too many requests wait for the model.
    """
    served = await resolve_model(request.ctx, body.model, task=None)
    if task or served.info.pooling is None:
        check_task(served.name, served.info.tasks, task or endpoint)
    check_queue(request.ctx, served, body.priority)
    return PoolingRequestHandler(request, body, served, endpoint, param)
