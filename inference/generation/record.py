"""The record of a generation's path through gateway and engine, which is stored."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from django.conf import settings

from engine.contract.errors import EngineFault
from engine.contract.messages import FlightRecord
from inference.engine_client.flight import InFlightRequest
from inference.errors import as_quire_error
from inference.loop.offload import get_render_pool
from metering.access import (
    MAX_HOPS,
    MAX_OUTPUTS,
    Content,
    MediaTrace,
    OutputTrace,
    PlacementEvent,
    RequestTrace,
)

if TYPE_CHECKING:
    from engine.text.tokenizer import Tokenizer
    from inference.generation.generation import Generation
    from inference.request.job import Job


def response_metrics(flights: list[InFlightRequest]) -> dict[str, dict[str, float]]:
    """Return `{"metrics": ...}` of a finished request; {} unless `PER_REQUEST_METRICS` includes
    metrics in responses.
    """
    return (
        {"metrics": compute_request_metrics(flights)} if settings.QUIRE.per_request_metrics else {}
    )


def compute_request_metrics(flights: list[InFlightRequest]) -> dict[str, float]:
    """Return vLLM's per-request metrics in milliseconds, over all prompts and outputs together.

    Outputs that the engine didn't report (a stop string ended them at the gateway) are left out,
    as are metrics that a single token doesn't have. The time to first token begins when the prompt
    is first computed; `queue_time_ms` is the time before that.
    """
    records = [record for flight in flights for record in flight.records.values()]
    if not records:
        return {}
    started = min(record.queue_time for record in records)
    first = min(map(_time_to_first_token, records)) - started
    last = max(_time_to_first_token(record) + record.decode_time for record in records) - started
    tokens = [len(output) for flight in flights for output in flight.tokens]
    metrics = {
        "queue_time_ms": 1000 * started,
        "time_to_first_token_ms": 1000 * first,
        "generation_time_ms": 1000 * (last - first),
    }
    if (longest := max(tokens)) > 1:
        metrics["mean_itl_ms"] = 1000 * (last - first) / (longest - 1)
    if last > 0:
        metrics["tokens_per_second"] = sum(tokens) / last
    return {name: round(value, 3) for name, value in metrics.items()}


def _time_to_first_token(record: FlightRecord) -> float:
    """Return seconds from a request's arrival to an output's first token."""
    return record.queue_time + record.prefill_time


#: Number of tokens kept at the beginning and at the end of a text; see `RequestContent`.
_MAX_STORED_TOKENS = 2000
_MAX_STORED_CHARS = 16_000


def build_request_trace(generation: Generation, error: BaseException | None) -> RequestTrace:
    """Return the record of a finished generation."""
    job, admission = generation.job, generation.admission
    reported_error = None if error is None else as_quire_error(error)
    return RequestTrace(
        header_id=job.ctx.request_id,
        answer_id=job.ctx.record.answer_id if job.ctx.record is not None else "",
        code="" if reported_error is None else str(reported_error.code or ""),
        message="" if reported_error is None else reported_error.message,
        replica=generation.replica_id,
        numerics_changed=generation.usage.numerics_changed,
        rates=admission.prices,
        limits={
            name: value
            for name in _LIMITS
            if isinstance(value := getattr(admission, name, None), int)
        },
        asked=job.ledger_expectation() | ({"priority": job.priority} if job.priority else {}),
        media=_media(job),
        admitted_ms=(generation.admitted_at - job.received_at) * 1000,
        hops=_placement_events(generation.flights, job.received_at),
        outputs=_outputs(generation),
        tokens=generation.pace.since(job.received_at),
    )


def _media(job: Job) -> list[MediaTrace]:
    return [
        MediaTrace(
            kind=item.kind,
            digest=item.digest.hex(),
            tokens=item.num_vectors,
            size_bytes=len(job.media_data.get(item.digest, b"")),
        )
        for item in (job.media[0] if job.media else ())
    ]


_LIMITS = (
    *("limit_requests", "remaining_requests", "limit_tokens", "remaining_tokens"),
    "output_tokens",
)


def _placement_events(flights: list[InFlightRequest], start: float) -> list[PlacementEvent]:
    hops = sorted(
        (hop for flight in flights for hop in flight.placement_history), key=lambda hop: hop[0]
    )
    return [
        PlacementEvent(at_ms=(seconds - start) * 1000, replica=replica, reason=reason)
        for seconds, replica, reason in hops[:MAX_HOPS]
    ]


def _outputs(generation: Generation) -> list[OutputTrace]:
    traces: list[OutputTrace] = []
    for flight in generation.flights:
        for index in range(len(flight.tokens)):
            if len(traces) == MAX_OUTPUTS:
                return traces
            record = flight.records.get(index, FlightRecord())
            output = generation.outputs[flight.number][index]
            traces.append(_output(flight, index, record, output.finish_reason or ""))
    return traces


def _output(flight: InFlightRequest, index: int, record: FlightRecord, reason: str) -> OutputTrace:
    return OutputTrace(
        number=flight.number,
        index=index,
        tokens=len(flight.tokens[index]),
        reason=reason,
        queue_ms=record.queue_time * 1000,
        prefill_ms=record.prefill_time * 1000,
        decode_ms=record.decode_time * 1000,
        num_chunks=record.prefill_chunks,
        chunks=record.chunks,
        cached=record.num_cached_tokens,
        cold=record.cold_reason,
        preemptions=record.num_preemptions,
        preempted_at=record.preempted_at,
        steps=record.num_steps,
        drafts=record.num_draft_tokens,
        accepted=record.num_accepted_tokens,
        drafted=round(record.mean_accepted_length, 2),
        ahead=record.num_ahead,
        ahead_own=record.num_ahead_own,
        behind=record.behind,
    )


async def decode_content(generation: Generation, request_id: str) -> Content:
    """Decode prompt and output as the model saw them, in a thread."""
    job = generation.job
    answers = [tokens for flight in generation.flights for tokens in flight.tokens]

    def decode() -> tuple[str, str]:
        tokenizer = job.model.tokenizer
        prompts = map(job.prompt_token_ids, range(len(job.prompts[:MAX_OUTPUTS])))
        prompt = "\n\n".join(_text(tokenizer, ids) for ids in prompts)
        answer = "\n\n".join(_text(tokenizer, ids) for ids in answers[:MAX_OUTPUTS])
        return _truncate_middle(prompt), _truncate_middle(answer)

    length = 4 * min(job.prompt_tokens, 2 * _MAX_STORED_TOKENS)
    prompt, answer = await get_render_pool().run(job.caller.tenant, length, decode)
    started_at = datetime.fromtimestamp(job.started_at, UTC)
    return Content(request_id, job.caller.tenant_id, prompt, answer, started_at)


def _text(tokenizer: Tokenizer, ids: list[int]) -> str:
    num_omitted = len(ids) - 2 * _MAX_STORED_TOKENS
    try:
        if num_omitted <= 0:
            return tokenizer.decode(ids, skip_special_tokens=False)
        first = tokenizer.decode(ids[:_MAX_STORED_TOKENS], skip_special_tokens=False)
        last = tokenizer.decode(ids[-_MAX_STORED_TOKENS:], skip_special_tokens=False)
    except EngineFault as error:
        return f"[{error.message}]"
    return f"{first}\n[{num_omitted} tokens]\n{last}"


def _truncate_middle(text: str) -> str:
    """Truncate a text in its middle, and remove characters that databases reject."""
    if len(text) > _MAX_STORED_CHARS:
        half = _MAX_STORED_CHARS // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters]\n{text[-half:]}"
    return text.replace("\0", "").encode("utf-8", "replace").decode()
