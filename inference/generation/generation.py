"""`Generation`: a job from admission to the ledger."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import replace
from http import HTTPStatus
from typing import Self

from engine.contract.errors import EngineOverloaded, QuireError
from inference.engine_client.client import get_engine_client
from inference.engine_client.flight import InFlightRequest, Submission
from inference.engine_client.mailbox import TokenChunk
from inference.errors import as_quire_error, rename_error_param
from inference.generation.background import KeyRevalidator, release_prompts, spawn
from inference.generation.continuity import StreamContinuity, is_resumable, take_over_generation
from inference.generation.output import OutputDelta, OutputState, TokenTimeline
from inference.generation.record import build_request_trace, decode_content
from inference.generation.takeover import StreamNotFound, TakenOverStream, request_fingerprint
from inference.loop.fair_dispatch import (
    finish_dispatch,
    iterate_cooperatively,
    run_in_thread_if_many,
)
from inference.metrics.recorder import history, recorder
from inference.request.job import Job, Usage
from inference.request.position import StreamPosition
from inference.tracing import generation_span
from metering.access import (
    Admission,
    EngineUsage,
    UsageRecord,
    admit,
    log_content,
    log_request,
    settle,
)

logger = logging.getLogger(__name__)

#: Maximum seconds that settling waits for the engine's report on an aborted request.
GONE_TIMEOUT_S = 5.0
CLIENT_LEFT = 499
#: Maximum number of tokens hashed on the event loop, which takes about 5 microseconds.
INLINE_MAX_HASHED_TOKENS = 512
#: Maximum seconds that a request's record waits for the engine's record of an output that a stop
#: string ended at the gateway.
RECORDS_TIMEOUT_S = 1.0


class Generation:
    """A running job. Read deltas with `next` until `finished`; always call `release`.

    `release` may be called from any thread, at any time and repeatedly: it aborts running requests
    and settles the usage exactly once.
    """

    def __init__(
        self,
        job: Job,
        admission: Admission,
        outputs: list[list[OutputState]],
        taken_over: TakenOverStream | None = None,
    ) -> None:
        """`outputs`: [prompt][output]. `taken_over`: another gateway's stream to continue."""
        self.job = job
        self.admission = admission
        self._continuity = StreamContinuity(job, taken_over)
        self.outputs = outputs
        self.first_token_at: float | None = None
        self.admitted_at = time.perf_counter()
        self.pace = TokenTimeline()
        if job.ctx.record is not None:
            job.ctx.record.admitted = True
        #: Counted by `ChatSession`; None for a model without reasoning.
        self.reasoning_tokens: int | None = None
        self._last_token_at = 0.0
        self._unfinished = len(job.prompts) * job.sampling.num_sequences
        self._cached = [0] * len(job.prompts)
        #: Number of tokens of each output whose text `next` returned.
        self._emitted_tokens = [[0] * job.sampling.num_sequences for _ in job.prompts]
        self._error: QuireError | None = None
        self._bill_partial = job.ctx.bill_partial
        self._settled = self._delivered = False
        self._pending_response = None if job.stream else job.ctx.pending_response
        if self._pending_response is not None:
            self._pending_response.requests.append(job.request_id)
        self._loop = asyncio.get_running_loop()
        self._span = generation_span(job)
        if self._span is not None:
            job.trace_headers = self._span.headers
        self._submission: Submission = get_engine_client().submit(
            job.engine_requests(admission.output_tokens),
            job.model.base,
            tenant=job.caller.tenant,
            stream=self._continuity.stream,
            resume_state=self._continuity.resume_state,
        )
        self._key_revalidator = KeyRevalidator(job.caller, self._submission.mailbox.fail)

    @property
    def flights(self) -> list[InFlightRequest]:
        """The job's engine requests, one per prompt."""
        return self._submission.flights

    @property
    def replica_id(self) -> str:
        """The last replica that the job was assigned to."""
        return self._submission.replica_id

    @property
    def resumed_from(self) -> StreamPosition | None:
        """The position at which the client resumed a stream; None for a new stream."""
        return self._continuity.position

    @property
    def has_delivered_tokens(self) -> bool:
        """Whether the first deltas were already received by the client."""
        return self._continuity.has_delivered_tokens

    @classmethod
    async def start(cls, job: Job) -> Self:
        """Admit and submit a job that passed `Job.check`, or take over the stream that its client
        resumes.

        Raises:
            RateLimited: a limit is reached. ServiceUnavailable: the limits can't be read.
            StreamNotFound, InvalidRequest: there is no such stream to continue.
        """
        position = job.ctx.position if job.stream else None
        fingerprint = await _request_fingerprint(job)
        if position is None and job.sampling.seed is None:
            # With an explicit seed another replica continues with the same tokens.
            job.sampling.seed = secrets.randbits(63)
        if job.sampling.num_sequences > job.sampling.n and job.sampling.logprobs is None:
            job.sampling.logprobs = 0  # needed to choose the best outputs
        await get_engine_client().start()
        outputs = await _initial_outputs(job)  # before anything is reserved
        taken_over: TakenOverStream | None = None
        try:
            if position is None:
                admission = await cls._admit(job)
            else:
                # Shielded: if the client leaves meanwhile, this gateway must still finish the
                # takeover, end the stream and bill it.
                takeover = asyncio.create_task(take_over_generation(job, position, fingerprint))
                try:
                    admission, taken_over = await asyncio.shield(takeover)
                except asyncio.CancelledError:
                    spawn(cls._release_taken_over(takeover, job, outputs, fingerprint))
                    raise
            generation = cls(job, admission, outputs, taken_over)
        except BaseException as error:
            # E.g. the client left while Redis admitted the job: release the reservation.
            if position is None and not isinstance(error, QuireError):
                spawn(settle(_rejected_usage(job)))
            raise
        generation._continuity.begin(fingerprint, admission)
        return generation

    @classmethod
    async def _release_taken_over(
        cls,
        takeover: asyncio.Task[tuple[Admission, TakenOverStream]],
        job: Job,
        outputs: list[list[OutputState]],
        fingerprint: bytes,
    ) -> None:
        """End a stream whose client left during the takeover, if the takeover succeeds."""
        try:
            admission, taken_over = await takeover
        except QuireError:
            return  # not taken over, so not this gateway's to end
        generation = cls(job, admission, outputs, taken_over)
        generation._continuity.begin(fingerprint, admission)
        generation.release()

    @staticmethod
    async def _admit(job: Job) -> Admission:
        """Admit the job by limits and budgets; count rejections."""
        try:
            return await admit(job.caller, job.admission_request(get_engine_client().gateway_id))
        except QuireError as error:
            recorder.refused(job, error)
            raise

    @property
    def waiting(self) -> bool:
        """Whether the job is not assigned to any replica now."""
        return not self._settled and self._submission.waiting

    @property
    def finished(self) -> bool:
        """Whether every output has ended."""
        return self._unfinished == 0

    async def next(self, wait_s: float | None = None) -> list[OutputDelta]:
        """Return the next deltas, at most one per output; [] after `wait_s` seconds without tokens,
        or if the new tokens have no text yet, such as half a character.

        Raises: errors of the engine, the gateway and the tokenizer. The generation is released.
        """
        if self._delivered:  # the caller has sent the previous deltas to its client
            self._continuity.mark_delivered()
        try:
            chunks = self._continuity.replayed_chunks()
            if chunks is None:
                chunks = await self._submission.next_chunks(wait_s)
            self._key_revalidator.maybe_check()  # revoking a key ends its streams
            deltas = [delta for chunk in chunks if (delta := self._apply_chunk(chunk)) is not None]
        except QuireError as error:
            self._error = error
            if error.code == EngineOverloaded.code:
                recorder.count(
                    "vllm:admission_rejections", (self.job.model.base, "max_num_queued_reqs")
                )
            self.release()
            raise rename_error_param(error, self.job.field_names) from None
        if self._continuity.is_missing_end(self.outputs):
            self._error = StreamNotFound()
            self.release()
            raise self._error
        for delta in deltas:
            output = self.outputs[delta.number][delta.index]
            self._emitted_tokens[delta.number][delta.index] = output.num_tokens
        self._delivered = self._delivered or bool(deltas)
        if self.finished:
            self._continuity.mark_delivered()
            self.release()
        return deltas

    def _apply_chunk(self, chunk: TokenChunk) -> OutputDelta | None:
        output = self.outputs[chunk.number][chunk.index]
        if output.finish_reason is not None:
            return None
        if not self._continuity.replaying:
            self._record_latency(len(chunk.token_ids))
        if chunk.num_cached_tokens:
            cached = min(chunk.num_cached_tokens, len(self.job.prompts[chunk.number]))
            self._cached[chunk.number] = max(self._cached[chunk.number], cached)
        if (flight := chunk.flight) is not None:
            logger.debug(
                "%s/%d/%d: queued %.3f s, %d chunks, %d tokens cached%s, %d preemptions, %d steps",
                self.job.request_id,
                chunk.number,
                chunk.index,
                flight.queue_time,
                flight.prefill_chunks,
                flight.num_cached_tokens,
                f" ({flight.cold_reason})" if flight.cold_reason else "",
                flight.num_preemptions,
                flight.num_steps,
            )
        delta = output.push(chunk)
        if output.finish_reason is not None:
            self._unfinished -= 1
            if chunk.finish_reason is None:
                self._submission.finish_output(chunk.number, chunk.index)
        return delta

    def _record_latency(self, num_tokens: int) -> None:
        now = time.perf_counter()
        if self.first_token_at is None:
            self.first_token_at = now
            history.tokens(self.job, num_tokens)
            recorder.first_token(self.job, self._submission.replica_id, now - self.job.received_at)
        elif num_tokens:
            recorder.token_gap(
                self.job,
                self._submission.replica_id,
                now - self._last_token_at,
                num_tokens,
            )
        self._last_token_at = now
        self.pace.add(now, num_tokens)

    @property
    def usage(self) -> Usage:
        """Usage so far."""
        return Usage(
            prompt_tokens=self.job.prompt_tokens,
            completion_tokens=sum(
                output.num_tokens for outputs in self.outputs for output in outputs
            ),
            cached_tokens=sum(self._cached),
            image_tokens=self.job.image_tokens,
            audio_tokens=self.job.audio_tokens,
            reasoning_tokens=self.reasoning_tokens,
            numerics_changed=self._submission.numerics_changed,
        )

    @property
    def ttft_ms(self) -> float | None:
        """Milliseconds from the request's arrival to its first token."""
        if self.first_token_at is None:
            return None
        return (self.first_token_at - self.job.received_at) * 1000

    def discard(self) -> None:
        """Bill nothing unless the job has finished: a worker will generate it again."""
        self._bill_partial = False

    def release(self) -> None:
        """Abort running requests and settle the usage, once. Callable from any thread."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop:
            self._release()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._release)

    def _release(self) -> None:
        if self._settled:
            return
        self._settled = True
        duration_ms = (time.perf_counter() - self.job.received_at) * 1000
        self._submission.close()
        spawn(self._settle(duration_ms))

    async def _settle(self, duration_ms: float) -> None:
        """Bill the usage after the engine reported the tokens of aborted requests."""
        job, used = self.job, self.job.model.use
        await self._submission.wait_aborted(GONE_TIMEOUT_S)
        await finish_dispatch.current().wait(job.caller.tenant)
        usage = await run_in_thread_if_many(len(job.prompts) * len(self.outputs[0]), self._billed)
        status = 200 if self.finished else CLIENT_LEFT
        if self._error is not None:
            status = as_quire_error(self._error).status
        first = self.outputs[0][0]
        reason = first.engine_reason or first.finish_reason
        if reason is None:
            reason = "error" if self._error is not None else "abort"
        first_at = self.first_token_at
        recorder.record_request_end(
            job,
            usage,
            self._submission.replica_id,
            reason,
            finished=self.finished,
            refused=self._error is not None and status < HTTPStatus.INTERNAL_SERVER_ERROR,
            duration_s=duration_ms / 1000,
            decode_s=None if first_at is None else self._last_token_at - first_at,
            longest=max(output.num_tokens for outputs in self.outputs for output in outputs),
        )
        if self._span is not None:
            outputs = [output for outputs in self.outputs for output in outputs]
            self._span.end(
                usage,
                [output.finish_reason or reason for output in outputs],
                None if self._error is None else self._error.code,
                None if self.ttft_ms is None else self.ttft_ms / 1000,
            )
        usage, prices = await self._continuity.settled(usage), self.admission.prices
        record = UsageRecord(
            request_id=self._continuity.ledger_id,
            tenant_id=job.caller.tenant_id,
            key_id=job.caller.key_id,
            user_id=job.caller.user_id,
            endpoint=job.endpoint,
            model=job.model.base,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            image_tokens=usage.image_tokens,
            images=usage.images,
            audio_ms=usage.audio_ms,
            completion_tokens=usage.completion_tokens,
            cost_nanos=prices.cost_nanos(
                usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
            )
            + prices.media_nanos(usage.images, usage.audio_ms),
            finish_reason=reason,
            status=status,
            started_at=job.started_at,
            ttft_ms=self.ttft_ms,
            duration_ms=duration_ms,
            stream=job.stream,
            adapter=used.name if used is not None else "",
            adapter_digest=used.digest if used is not None else "",
            in_place_of=job.model.fallback_for,
        )
        if self._pending_response is not None:
            await self._pending_response.done.wait()
        account = await run_in_thread_if_many(
            len(job.prompts) * len(self.outputs[0]), self._account
        )
        await settle(record, self.admission, account)
        await self._log(record)
        release_prompts(job.prompts)

    def _account(self) -> EngineUsage:
        """Return what the engine's own count of usage is compared with."""
        job, billed = self.job, self._continuity.billed
        outputs = [output for outputs in self.outputs for output in outputs]
        return EngineUsage(
            job.engine_ids,
            job.sampling.num_sequences,
            is_complete=self._error is None and all(output.engine_reason for output in outputs),
            billed_prompt=billed.prompt_tokens,
            billed_output=billed.completion_tokens,
        )

    async def _log(self, record: UsageRecord) -> None:
        await self._submission.wait_records(RECORDS_TIMEOUT_S)
        trace = build_request_trace(self, self._error)
        if record.request_id != self.job.request_id and not trace.answer_id:
            trace.answer_id = self.job.request_id
        log_request(record, trace)
        if self.job.caller.store_prompts:
            log_content(await decode_content(self, record.request_id))

    def _billed(self) -> Usage:
        """Usage to bill: prompts that the engine began, and all tokens that reached this gateway.

        If no replica was left to continue, only the tokens that a stream delivered are billed.
        """
        if not self._bill_partial and not self.finished:
            return Usage()
        if self._error is not None and self._error.status == HTTPStatus.SERVICE_UNAVAILABLE:
            return self._billed_after_failure()
        computed = list(filter(self._submission.was_computed, range(len(self.job.prompts))))
        return replace(
            self.job.prompt_usage(computed),
            completion_tokens=sum(
                output.num_tokens
                if output.finish_reason is not None
                else self._submission.num_tokens(output.number, output.index)
                for outputs in self.outputs
                for output in outputs
            ),
            cached_tokens=sum(self._cached),
        )

    def _billed_after_failure(self) -> Usage:
        """Usage to bill after a 503: prompts and tokens that a stream delivered, else nothing."""
        delivered = self._emitted_tokens if self.job.stream else [[0] for _ in self.job.prompts]
        billed = [number for number, tokens in enumerate(delivered) if any(tokens)]
        return replace(
            self.job.prompt_usage(billed),
            completion_tokens=sum(map(sum, delivered)),
            cached_tokens=sum(self._cached[number] for number in billed),
        )


def _rejected_usage(job: Job) -> UsageRecord:
    """Return the usage record of a request that ended before it was sent to an engine."""
    return UsageRecord(
        request_id=job.request_id,
        tenant_id=job.caller.tenant_id,
        key_id=job.caller.key_id,
        user_id=job.caller.user_id,
        endpoint=job.endpoint,
        model=job.model.base,
        prompt_tokens=0,
        completion_tokens=0,
        finish_reason="abort",
        status=CLIENT_LEFT,
        started_at=job.started_at,
        duration_ms=(time.perf_counter() - job.received_at) * 1000,
        stream=job.stream,
    )


async def _request_fingerprint(job: Job) -> bytes:
    """Return bytes that identify the request to other gateways; b"" if it can't be resumed."""
    if not is_resumable(job):
        return b""
    return await run_in_thread_if_many(
        job.prompt_tokens // INLINE_MAX_HASHED_TOKENS, lambda: request_fingerprint(job)
    )


async def _initial_outputs(job: Job) -> list[list[OutputState]]:
    """Return new states of a job's outputs: [prompt][output]."""
    indices, tokenizer = range(job.sampling.num_sequences), job.model.tokenizer
    return [
        [
            OutputState(number, index, tokenizer, prompt, job.sampling, job.preserved_token_ids)
            for index in indices
        ]
        async for number, prompt in iterate_cooperatively(
            enumerate(map(job.prompt_token_ids, range(len(job.prompts))))
        )
    ]
