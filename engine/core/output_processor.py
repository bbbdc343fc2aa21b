"""Turns the result of a step into the sequences' tokens and the clients' deltas."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from engine.contract.errors import QuireError
from engine.contract.messages import ErrorInfo, TokenDelta, TokenLogprobs
from engine.contract.pooling_params import ALIGN
from engine.core.beam_group import BeamGroup, BeamRequest
from engine.core.stats import EngineStatsCollector
from engine.core.token_alignment import TokenAligner
from engine.scheduler import GrammarOutput, Request, Scheduler, StepPlan, StepResult
from engine.scheduler.request import Sequence
from engine.structured_output.manager import StructuredOutputManager


def token_delta(
    sequence: Sequence,
    token_ids: list[int],
    logprobs: list[TokenLogprobs] | None,
    *,
    first: bool,
) -> TokenDelta:
    """A delta with a sequence's last `num_new` tokens, and its finish reason if it has ended."""
    delta = TokenDelta(
        request_id=sequence.request.request_id,
        index=sequence.index,
        token_ids=token_ids,
        start=len(sequence.token_ids) - sequence.num_prompt_tokens - len(token_ids),
    )
    if logprobs is not None:
        delta.logprobs = logprobs
    is_finished = sequence.finish_reason is not None
    if first or is_finished:
        delta.num_prompt_tokens = sequence.num_prompt_tokens
        delta.num_cached_tokens = sequence.num_cached_tokens
    if first:
        delta.prompt_logprobs = sequence.prompt_logprobs
    if is_finished:
        delta.finish_reason = sequence.finish_reason
        delta.stop_reason = sequence.stop_reason
        delta.flight = sequence.timeline
        delta.kv_transfer_params = sequence.kv_transfer_result
    return delta


class OutputProcessor:
    """Appends sampled tokens, ends sequences, and makes the deltas.

    When a method returns, the sequences that it ended hold no blocks, and their requests are
    removed.

    Args:
        requests: the engine's requests by id; one is removed with its last sequence.
        eos_token_ids: tokens that end an output unless `ignore_eos`.
        detach: called with each attachment handle of a removed request.
        on_end: called with each request whose last output has ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        structured: StructuredOutputManager,
        counters: EngineStatsCollector,
        requests: dict[str, Request],
        eos_token_ids: Iterable[int],
        detach: Callable[[int], None] = lambda handle: None,
        on_end: Callable[[Request], None] = lambda request: None,
    ) -> None:
        self._scheduler = scheduler
        self._structured = structured
        self._grammars = structured.states
        self._counters = counters
        self._requests = requests
        self._eos_token_ids = frozenset(eos_token_ids)
        self._detach = detach
        self._on_end = on_end
        self._charge = scheduler.waiting.charge_output
        self._complete_beams: list[BeamGroup] = []
        self.aligner = TokenAligner()

    def process_outputs(
        self,
        plan: StepPlan,
        scheduled: list[Sequence],
        result: StepResult,
        bitmask: GrammarOutput | None = None,
    ) -> list[TokenDelta]:
        """Append the sampled tokens, end sequences, and make the deltas.

        `scheduled` are the plan's sequences in its order, `bitmask` the tokens that grammars
        allowed. Sequences that have ended since the plan was made are skipped.
        """
        if plan.drafts:
            self._scheduler.drafts.process(plan, scheduled, result.token_ids)
            self._counters.record_drafts(plan, result)
        self._counters.record_prompts(plan, scheduled)
        has_special = bool(
            result.prompt_logprobs or result.errors or result.pooled or result.candidates
        )
        logprobs = result.logprobs
        deltas: list[TokenDelta] = []
        for row, (sequence, token_ids) in enumerate(zip(scheduled, result.token_ids, strict=True)):
            if plan.num_samples[row]:
                sequence.isolated = False
            if sequence.finished:
                continue
            if has_special:
                deltas += self._process_special(sequence, plan, result)
            if token_ids:
                scores = logprobs[row] if logprobs else None
                self._process_tokens(sequence, token_ids, scores, bitmask, deltas)
        self._counters.record_output(deltas)
        for beams in self._complete_beams:
            if not beams.request.finished and beams.advance(self._scheduler):
                deltas += self._finish_beam_search(beams)
        self._complete_beams.clear()
        return deltas

    def _process_special(
        self, sequence: Sequence, plan: StepPlan, result: StepResult
    ) -> list[TokenDelta]:
        """Process prompt logprobs (sent with the first token), errors, pooled prompts, and the
        candidates of beams.
        """
        seq_id = sequence.seq_id
        if scores := result.prompt_logprobs.get(seq_id):
            sequence.prompt_logprobs = [*(sequence.prompt_logprobs or []), *scores]
        if reason := result.errors.get(seq_id):
            return self.finish_with_fault(sequence, reason)
        if pooled := result.pooled.get(seq_id):
            self._counters.record_prompt(sequence, sequence.num_prompt_tokens)
            sequence.first_token_at = time.time()
            request = sequence.request
            params, on_done = request.message.pooling, request.on_done
            if params is not None and params.task == ALIGN:
                # Its inbox entry is acknowledged only once the times are computed.
                request.on_done = None
                self.finish(sequence, "stop")
                delta = token_delta(sequence, [], None, first=True)
                num_tokens = sequence.num_prompt_tokens - params.align_from
                self.aligner.submit(delta, pooled, num_tokens, params.num_states, on_done)
                return []
            self.finish(sequence, "stop")
            delta = token_delta(sequence, [], None, first=True)
            delta.pooled = pooled
            return [delta]
        request, candidates = sequence.request, result.candidates.get(seq_id)
        beams = request.beams if isinstance(request, BeamRequest) else None
        if beams is not None and candidates is not None:
            self._charge(sequence)
            self._counters.record_prompt(sequence, sequence.num_prompt_tokens)
            complete = beams.process_candidates(sequence, candidates, plan, self._scheduler)
            # A beam that was preempted after it got its candidates computes them again.
            if complete and beams not in self._complete_beams:
                self._complete_beams.append(beams)
        return []

    def _process_tokens(
        self,
        sequence: Sequence,
        sampled: list[int],
        scores: list[TokenLogprobs] | None,
        bitmask: GrammarOutput | None,
        deltas: list[TokenDelta],
    ) -> None:
        """Add a sequence's new tokens, up to the one that ends it, as one delta."""
        if sequence.num_placeholders:
            sequence.num_placeholders -= 1
        self._charge(sequence, len(sampled))
        first = sequence.first_token_at == 0.0
        if first:
            sequence.first_token_at = time.time()
            self._counters.record_prompt(sequence, sequence.num_prompt_tokens)
        capped = sequence.request.remaining_tokens is not None
        if capped or len(sampled) > 1 or sequence.seq_id in self._grammars:
            deltas += self._append(sequence, sampled, scores, bitmask, first=first)
            return
        # Common case: one token, without grammar, drafts or token cap.
        sequence.token_ids += sampled
        end = self.finish_reason(sequence, sampled[0])
        if end is not None:
            self.finish(sequence, *end)
        deltas.append(token_delta(sequence, sampled, scores, first=first))

    def _append(
        self,
        sequence: Sequence,
        sampled: list[int],
        scores: list[TokenLogprobs] | None,
        bitmask: GrammarOutput | None,
        *,
        first: bool,
    ) -> list[TokenDelta]:
        """Append sampled tokens and those that a grammar forces, up to the request's token cap."""
        num_tokens, request = len(sequence.token_ids), sequence.request
        rejection = self._advance_grammar(sequence, sampled, bitmask)
        token_ids = sequence.token_ids[num_tokens:]
        deltas: list[TokenDelta] = []
        if token_ids or rejection is None:
            scores = scores and scores[: len(token_ids)]
            deltas.append(token_delta(sequence, token_ids, scores, first=first))
        if rejection is not None:
            deltas += self.reject(sequence, rejection)
        elif request.remaining_tokens == 0:
            for other in request.sequences:
                if not other.finished:
                    deltas += self.finish_early(other, "budget")
        return deltas

    def _advance_grammar(
        self, sequence: Sequence, sampled: list[int], bitmask: GrammarOutput | None
    ) -> QuireError | None:
        """Append tokens up to the one that ends the sequence. Returns its grammar's error."""
        request = sequence.request
        for token_id in sampled:
            token_ids = [token_id]
            if sequence.seq_id in self._grammars:
                try:
                    token_ids = self._structured.accept_tokens(sequence, token_id, bitmask)
                except QuireError as error:
                    return error
            if request.remaining_tokens is not None:
                token_ids = token_ids[: request.remaining_tokens]
                request.remaining_tokens -= len(token_ids)
            sequence.token_ids += token_ids
            end = self.finish_reason(sequence, token_ids[-1])
            if end is None and request.remaining_tokens == 0:
                end = ("budget", None)
            if end is not None:
                self.finish(sequence, *end)
                break
        return None

    # -- ends ---------------------------------------------------------------------------------

    def finish_reason(self, sequence: Sequence, token_id: int) -> tuple[str, int | None] | None:
        """(finish reason, stop token id) if a sequence's last token ends it, else None."""
        params = sequence.request.message.sampling
        generated = len(sequence.token_ids) - sequence.num_prompt_tokens
        if self._grammars and (grammar := self._grammars.get(sequence.seq_id)) is not None:
            is_stop = token_id in self._eos_token_ids or token_id in grammar.stop_token_ids
            if is_stop and grammar.complete:
                return "stop", None
        if generated >= params.min_tokens:
            if token_id in self._eos_token_ids and not params.ignore_eos:
                return "stop", None
            if params.stop_token_ids and token_id in params.stop_token_ids:
                return "stop", token_id
        if generated >= sequence.max_output_tokens:
            return "length", None
        repetition = params.repetition_detection
        if (
            repetition is not None
            and generated >= params.min_tokens
            and repetition.is_repeating(sequence.token_ids, generated)
        ):
            return "repetition", None
        return None

    def finish(self, sequence: Sequence, reason: str, stop_reason: int | None = None) -> None:
        """End a sequence and free its blocks; remove the request with its last sequence."""
        self._scheduler.finish(sequence, reason, stop_reason)
        self._structured.leave(sequence)
        self._counters.record_finished(sequence, reason)
        request = sequence.request
        if request.finished:
            self._requests.pop(request.request_id, None)
            for handle in request.attachment_handles:
                self._detach(handle)
            self._on_end(request)
            if request.on_done is not None:
                request.on_done()
            request.clear_sequences()

    def finish_early(self, sequence: Sequence, reason: str) -> list[TokenDelta]:
        """End a sequence at the request of a client or operator."""
        return [
            token_delta(finished, [], None, first=finished.first_token_at == 0.0)
            for finished in self._finish_all(sequence, reason)
        ]

    def finish_with_fault(self, sequence: Sequence, reason: str) -> list[TokenDelta]:
        """End a sequence whose step failed."""
        message = f"The engine failed on this request: {reason}"
        return self._finish_with_error(sequence, ErrorInfo(message=message, code="engine_fault"))

    def reject(self, sequence: Sequence, error: QuireError) -> list[TokenDelta]:
        """End a sequence whose request can't be served after all."""
        return self._finish_with_error(sequence, ErrorInfo.of(error))

    def _finish_with_error(self, sequence: Sequence, error: ErrorInfo) -> list[TokenDelta]:
        deltas = [
            token_delta(finished, [], None, first=False)
            for finished in self._finish_all(sequence, "error")
        ]
        for delta in deltas:
            delta.error = error
        return deltas

    def _finish_beam_search(self, beams: BeamGroup) -> list[TokenDelta]:
        deltas = beams.deltas()
        now = time.time()
        for index, sequence in enumerate(beams.request.sequences):
            sequence.first_token_at = now
            reason = deltas[index].finish_reason if index < len(deltas) else None
            self.finish(sequence, reason or "stop")
        self._counters.stats.generation_tokens_total += sum(len(d.token_ids) for d in deltas)
        return deltas

    def _finish_all(self, sequence: Sequence, reason: str) -> list[Sequence]:
        """End a sequence; of a beam search, all beams. Returns the sequences that are outputs."""
        if not sequence.request.is_beam_search:
            self.finish(sequence, reason)
            return [sequence]
        sequences = sequence.request.sequences
        for beam in sequences:
            self.finish(beam, reason)
            # A beam's tokens have never been sent to the client.
            beam.token_ids = beam.token_ids[: beam.num_prompt_tokens]
        return sequences[: sequence.request.message.sampling.n]
