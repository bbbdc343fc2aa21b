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
            if plan.num_samples[at]:
                sequence.isolated = False
            if sequence.finished:
                continue
            if special:
                deltas += self._special(sequence, plan, result)
            if token_ids:
                scores = logprobs[at] if logprobs else None
                self._tokens(sequence, token_ids, scores, masks, deltas)
        self._counters.note_output(deltas)
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
        capped = sequence.request.tokens_left is not None
        if capped or len(sampled) > 1 or sequence.seq_id in self._grammars:
            deltas += self._append(sequence, sampled, scores, masks, first=first)
            return
        # The usual row: one token that nothing adds to or cuts.
        sequence.token_ids += sampled
        ended = self._exits.reason(sequence, sampled[0])
        if ended is not None:
            self._exits.leave(sequence, *ended)
        deltas.append(delta_of(sequence, sampled, scores, first=first))

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
        refused = self._follow(sequence, sampled, masks)
        token_ids = sequence.token_ids[before:]
        deltas: list[TokenDelta] = []
        if token_ids or refused is None:
            scores = scores and scores[: len(token_ids)]
            deltas.append(delta_of(sequence, token_ids, scores, first=first))
        if refused is not None:
            deltas += self._exits.refuse(sequence, refused)
        elif request.tokens_left == 0:
            for other in request.sequences:
                if not other.finished:
                    deltas += self._exits.finish(other, "budget")
        return deltas

    def _follow(
        self, sequence: Sequence, sampled: list[int], masks: GrammarOutput | None
    ) -> QuireError | None:
        """Append up to the token that ends the sequence. Returns why its grammar refused one."""
        request = sequence.request
        for token_id in sampled:
            token_ids = [token_id]
            if sequence.seq_id in self._grammars:
                try:
                    token_ids = self._structured.follow(sequence, token_id, masks)
                except QuireError as error:
                    return error
            if request.tokens_left is not None:
                token_ids = token_ids[: request.tokens_left]
                request.tokens_left -= len(token_ids)
            sequence.token_ids += token_ids
            ended = self._exits.reason(sequence, token_ids[-1])
            if ended is None and request.tokens_left == 0:
                ended = ("budget", None)
            if ended is not None:
                self._exits.leave(sequence, *ended)
                break
        return None
