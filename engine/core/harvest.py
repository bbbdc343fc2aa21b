"""What a step has sampled becomes the sequences' tokens and the clients' deltas."""

from __future__ import annotations

import time

from engine.beams.group import BeamGroup, BeamRequest
from engine.contract.errors import QuireError
from engine.contract.protocol import TokenDelta, TokenLogprobs
from engine.core.counters import EngineCounters
from engine.core.deltas import delta_of
from engine.core.exits import Exits
from engine.scheduler import GrammarOutput, Scheduler, Sequence, StepPlan, StepResult
from engine.structured.structured_outputs import StructuredOutputManager


class Harvest:
    """Takes over the results of steps, in their order."""

    def __init__(
        self,
        scheduler: Scheduler,
        structured: StructuredOutputManager,
        counters: EngineCounters,
        exits: Exits,
    ) -> None:
        self._structured = structured
        self._grammars = structured.states
        self._counters = counters
        self._exits = exits
        self._scheduler = scheduler
        self._charge = scheduler.waiting.charge_output
        self._complete_beams: list[BeamGroup] = []

    def take(
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
        self._counters.note_prompts(plan, scheduled)
        for at, (sequence, token_ids) in enumerate(zip(scheduled, result.token_ids, strict=True)):
            sequence.isolated = False
            if sequence.finished:
                continue
            if special:
                deltas += self._special(sequence, plan, result)
            if token_ids:
                scores = logprobs[at] if logprobs else None
                deltas += self._tokens(sequence, token_ids, scores, masks)
        for beams in self._complete_beams:
            if not beams.request.finished and beams.advance(self._scheduler):
                deltas += self._exits.complete_search(beams)
        self._complete_beams.clear()
        return deltas

    def _special(self, sequence: Sequence, plan: StepPlan, result: StepResult) -> list[TokenDelta]:
        """Prompt logprobs, which wait for the first token; a beam's candidates; the end of what
        failed or was pooled.
        """
        seq_id = sequence.seq_id
        if scores := result.prompt_logprobs.get(seq_id):
            sequence.prompt_logprobs = [*(sequence.prompt_logprobs or []), *scores]
        if reason := result.errors.get(seq_id):
            return self._exits.fail(sequence, reason)
        if pooled := result.pooled.get(seq_id):
            self._counters.note_prompt(sequence, sequence.num_prompt_tokens)
            return [self._exits.complete(sequence, pooled)]
        request, candidates = sequence.request, result.candidates.get(seq_id)
        beams = request.beams if isinstance(request, BeamRequest) else None
        if beams is not None and candidates is not None:
            self._charge(sequence)
            self._counters.note_prompt(sequence, sequence.num_prompt_tokens)
            complete = beams.take(sequence, candidates, plan, self._scheduler)
            # One that was preempted after it had its candidates brings them once more.
            if complete and beams not in self._complete_beams:
                self._complete_beams.append(beams)
        return []

    def _tokens(
        self,
        sequence: Sequence,
        sampled: list[int],
        scores: list[TokenLogprobs] | None,
        masks: GrammarOutput | None,
    ) -> list[TokenDelta]:
        """A sequence's new tokens, up to the one that ends it, in one delta."""
        if sequence.num_placeholders:
            sequence.num_placeholders -= 1
        request = sequence.request
        self._charge(sequence)
        first = sequence.first_token_at == 0.0
        if first:
            sequence.first_token_at = time.time()
            self._counters.note_prompt(sequence, sequence.num_prompt_tokens)
        token_ids: list[int] = []
        for token_id in sampled:
            try:
                token_ids += self._append(sequence, token_id, masks)
            except QuireError as error:
                before = [delta_of(sequence, token_ids, scores, first=first)] if token_ids else []
                return before + self._exits.refuse(sequence, error)
            if sequence.finished:
                break
        if scores is not None:
            scores = scores[: len(token_ids)]
        deltas = [delta_of(sequence, token_ids, scores, first=first)]
        if request.tokens_left == 0:
            for other in request.sequences:
                if not other.finished:
                    deltas += self._exits.finish(other, "budget")
        return deltas

    def _append(self, sequence: Sequence, token_id: int, masks: GrammarOutput | None) -> list[int]:
        """Append a sampled token and what its grammar adds; end the sequence where that ends it."""
        token_ids = [token_id]
        if self._grammars and sequence.seq_id in self._grammars:
            token_ids = self._structured.follow(sequence, token_id, masks)
        request = sequence.request
        if request.tokens_left is not None:
            token_ids = token_ids[: request.tokens_left]
            request.tokens_left -= len(token_ids)
        self._counters.stats.generation_tokens_total += len(token_ids)
        sequence.token_ids += token_ids
        ended = self._exits.reason(sequence, token_ids[-1])
        if ended is not None:
            self._exits.leave(sequence, *ended)
        elif request.tokens_left == 0:
            self._exits.leave(sequence, "budget")
        return token_ids
