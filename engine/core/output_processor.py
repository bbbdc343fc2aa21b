"""What a step has sampled becomes the sequences' tokens and the clients' deltas."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from engine.contract.errors import QuireError
from engine.contract.messages import ErrorInfo, TokenDelta, TokenLogprobs
from engine.core.beam_group import BeamGroup, BeamRequest
from engine.core.stats import EngineStatsCollector
from engine.scheduler import GrammarOutput, Request, Scheduler, StepPlan, StepResult
from engine.scheduler.request import Sequence
from engine.structured_output.manager import StructuredOutputManager

# -- What clients learn of a sequence in a step: its new tokens, its result, its end.


def token_delta(
    sequence: Sequence,
    token_ids: list[int],
    logprobs: list[TokenLogprobs] | None,
    *,
    first: bool,
) -> TokenDelta:
    """A sequence's new tokens (the last of its `token_ids`), and its end if it has come."""
    delta = TokenDelta(
        request_id=sequence.request.request_id,
        index=sequence.index,
        token_ids=token_ids,
        start=len(sequence.token_ids) - sequence.num_prompt_tokens - len(token_ids),
    )
    if logprobs is not None:
        delta.logprobs = logprobs
    ended = sequence.finish_reason is not None
    if first or ended:
        delta.num_prompt_tokens = sequence.num_prompt_tokens
        delta.num_cached_tokens = sequence.num_cached_tokens
    if first:
        delta.prompt_logprobs = sequence.prompt_logprobs
    if ended:
        delta.finish_reason = sequence.finish_reason
        delta.stop_reason = sequence.stop_reason
        delta.flight = sequence.timeline
    return delta


def pooled_delta(sequence: Sequence, pooled: bytes) -> TokenDelta:
    """The result and the end of a prompt that was pooled."""
    delta = token_delta(sequence, [], None, first=True)
    delta.pooled = pooled
    return delta


def error_delta(sequence: Sequence, reason: str) -> TokenDelta:
    """The end of a sequence whose step failed."""
    delta = token_delta(sequence, [], None, first=False)
    delta.error = ErrorInfo(
        message=f"The engine failed on this request: {reason}", code="engine_fault"
    )
    return delta


def rejection_delta(sequence: Sequence, error: QuireError) -> TokenDelta:
    """The end of a sequence whose request turned out to be one that can't be served."""
    delta = token_delta(sequence, [], None, first=False)
    delta.error = ErrorInfo.of(error)
    return delta


# -- How sequences end, and how they leave the engine.


class Exits:
    """Ends sequences: their blocks are free, and their requests forgotten, when a method returns.

    Args:
        requests: the engine's requests by id; one is removed with its last sequence.
        eos_token_ids: what ends an output unless `ignore_eos`.
        detach: called with each handle of a request that is forgotten.
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
        self.eos = frozenset(eos_token_ids)
        self._detach = detach
        self._on_end = on_end

    def finish_reason(self, sequence: Sequence, token_id: int) -> tuple[str, int | None] | None:
        """(finish reason, stop token id) when this token, its last, ends the sequence."""
        params = sequence.request.message.sampling
        generated = len(sequence.token_ids) - sequence.num_prompt_tokens
        if self._grammars and (grammar := self._grammars.get(sequence.seq_id)) is not None:
            ends = token_id in self.eos or token_id in grammar.stop_token_ids
            if ends and grammar.complete:
                return "stop", None
        if generated >= params.min_tokens:
            if token_id in self.eos and not params.ignore_eos:
                return "stop", None
            if params.stop_token_ids and token_id in params.stop_token_ids:
                return "stop", token_id
        if generated >= sequence.max_output_tokens:
            return "length", None
        circles = params.repetition_detection
        early = generated < params.min_tokens
        if (
            circles is not None
            and not early
            and circles.is_repeating(sequence.token_ids, generated)
        ):
            return "repetition", None
        return None

    def finish(self, sequence: Sequence, reason: str, stop_reason: int | None = None) -> None:
        """Take a sequence out; forget its request when it was the last."""
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
        """End a sequence from outside."""
        return [
            token_delta(each, [], None, first=each.first_token_at == 0.0)
            for each in self._finish_all(sequence, reason)
        ]

    def finish_with_fault(self, sequence: Sequence, reason: str) -> list[TokenDelta]:
        """End a sequence with an error that its client sees."""
        return [error_delta(each, reason) for each in self._finish_all(sequence, "error")]

    def reject(self, sequence: Sequence, error: QuireError) -> list[TokenDelta]:
        """End a sequence for a reason that lies in its request."""
        return [rejection_delta(each, error) for each in self._finish_all(sequence, "error")]

    def finish_pooled(self, sequence: Sequence, pooled: bytes) -> TokenDelta:
        """End a sequence whose prompt has been pooled."""
        sequence.first_token_at = time.time()
        self.finish(sequence, "stop")
        return pooled_delta(sequence, pooled)

    def finish_beam_search(self, beams: BeamGroup) -> list[TokenDelta]:
        """End the beams of a search that is over."""
        deltas = beams.deltas()
        now = time.time()
        for place, sequence in enumerate(beams.request.sequences):
            sequence.first_token_at = now
            reason = deltas[place].finish_reason if place < len(deltas) else None
            self.finish(sequence, reason or "stop")
        self._counters.stats.generation_tokens_total += sum(len(d.token_ids) for d in deltas)
        return deltas

    def _finish_all(self, sequence: Sequence, reason: str) -> list[Sequence]:
        """End a sequence; of a search, all beams. Returns one for each output that ends so."""
        if not sequence.request.is_beam_search:
            self.finish(sequence, reason)
            return [sequence]
        sequences = sequence.request.sequences
        for beam in sequences:
            self.finish(beam, reason)
            # A client has seen none of a beam's tokens.
            beam.token_ids = beam.token_ids[: beam.num_prompt_tokens]
        return sequences[: sequence.request.message.sampling.n]


class OutputProcessor:
    """Takes over the results of steps, in their order."""

    def __init__(
        self,
        scheduler: Scheduler,
        structured: StructuredOutputManager,
        counters: EngineStatsCollector,
        exits: Exits,
    ) -> None:
        self._structured = structured
        self._grammars = structured.states
        self._counters = counters
        self._exits = exits
        self._scheduler = scheduler
        self._charge = scheduler.waiting.charge_output
        self._complete_beams: list[BeamGroup] = []

    def process_outputs(
        self,
        plan: StepPlan,
        scheduled: list[Sequence],
        result: StepResult,
        masks: GrammarOutput | None = None,
    ) -> list[TokenDelta]:
        """Append what was sampled, find what has ended, and make the deltas.

        `scheduled` are the plan's sequences in its order, `masks` what their grammars allowed. A
        sequence that has ended since the plan was made gets nothing more.
        """
        deltas: list[TokenDelta] = []
        special = bool(
            result.prompt_logprobs or result.errors or result.pooled or result.candidates
        )
        logprobs = result.logprobs
        self._counters.record_prompts(plan, scheduled)
        for at, (sequence, token_ids) in enumerate(zip(scheduled, result.token_ids, strict=True)):
            if plan.num_samples[at]:
                sequence.isolated = False
            if sequence.finished:
                continue
            if special:
                deltas += self._process_special(sequence, plan, result)
            if token_ids:
                scores = logprobs[at] if logprobs else None
                self._process_tokens(sequence, token_ids, scores, masks, deltas)
        self._counters.record_output(deltas)
        for beams in self._complete_beams:
            if not beams.request.finished and beams.advance(self._scheduler):
                deltas += self._exits.finish_beam_search(beams)
        self._complete_beams.clear()
        return deltas

    def _process_special(
        self, sequence: Sequence, plan: StepPlan, result: StepResult
    ) -> list[TokenDelta]:
        """Prompt logprobs, which wait for the first token; a beam's candidates; the end of what
        failed or was pooled.
        """
        seq_id = sequence.seq_id
        if scores := result.prompt_logprobs.get(seq_id):
            sequence.prompt_logprobs = [*(sequence.prompt_logprobs or []), *scores]
        if reason := result.errors.get(seq_id):
            return self._exits.finish_with_fault(sequence, reason)
        if pooled := result.pooled.get(seq_id):
            self._counters.note_prompt(sequence, sequence.num_prompt_tokens)
            return [self._exits.finish_pooled(sequence, pooled)]
        request, candidates = sequence.request, result.candidates.get(seq_id)
        beams = request.beams if isinstance(request, BeamRequest) else None
        if beams is not None and candidates is not None:
            self._charge(sequence)
            self._counters.note_prompt(sequence, sequence.num_prompt_tokens)
            complete = beams.process_candidates(sequence, candidates, plan, self._scheduler)
            # One that was preempted after it had its candidates brings them once more.
            if complete and beams not in self._complete_beams:
                self._complete_beams.append(beams)
        return []

    def _process_tokens(
        self,
        sequence: Sequence,
        sampled: list[int],
        scores: list[TokenLogprobs] | None,
        masks: GrammarOutput | None,
        deltas: list[TokenDelta],
    ) -> None:
        """Add a sequence's new tokens, up to the one that ends it, as one delta."""
        if sequence.num_placeholders:
            sequence.num_placeholders -= 1
        self._charge(sequence, len(sampled))
        first = sequence.first_token_at == 0.0
        if first:
            sequence.first_token_at = time.time()
            self._counters.note_prompt(sequence, sequence.num_prompt_tokens)
        capped = sequence.request.remaining_tokens is not None
        if capped or len(sampled) > 1 or sequence.seq_id in self._grammars:
            deltas += self._append(sequence, sampled, scores, masks, first=first)
            return
        # The usual row: one token that nothing adds to or cuts.
        sequence.token_ids += sampled
        ended = self._exits.finish_reason(sequence, sampled[0])
        if ended is not None:
            self._exits.finish(sequence, *ended)
        deltas.append(token_delta(sequence, sampled, scores, first=first))

    def _append(
        self,
        sequence: Sequence,
        sampled: list[int],
        scores: list[TokenLogprobs] | None,
        masks: GrammarOutput | None,
        *,
        first: bool,
    ) -> list[TokenDelta]:
        """Append sampled tokens, what a grammar adds to them, and no more than a cap leaves."""
        before, request = len(sequence.token_ids), sequence.request
        refused = self._advance_grammar(sequence, sampled, masks)
        token_ids = sequence.token_ids[before:]
        deltas: list[TokenDelta] = []
        if token_ids or refused is None:
            scores = scores and scores[: len(token_ids)]
            deltas.append(token_delta(sequence, token_ids, scores, first=first))
        if refused is not None:
            deltas += self._exits.reject(sequence, refused)
        elif request.remaining_tokens == 0:
            for other in request.sequences:
                if not other.finished:
                    deltas += self._exits.finish_early(other, "budget")
        return deltas

    def _advance_grammar(
        self, sequence: Sequence, sampled: list[int], masks: GrammarOutput | None
    ) -> QuireError | None:
        """Append up to the token that ends the sequence. Returns why its grammar refused one."""
        request = sequence.request
        for token_id in sampled:
            token_ids = [token_id]
            if sequence.seq_id in self._grammars:
                try:
                    token_ids = self._structured.accept_tokens(sequence, token_id, masks)
                except QuireError as error:
                    return error
            if request.remaining_tokens is not None:
                token_ids = token_ids[: request.remaining_tokens]
                request.remaining_tokens -= len(token_ids)
            sequence.token_ids += token_ids
            ended = self._exits.finish_reason(sequence, token_ids[-1])
            if ended is None and request.remaining_tokens == 0:
                ended = ("budget", None)
            if ended is not None:
                self._exits.finish(sequence, *ended)
                break
        return None
