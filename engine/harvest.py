"""What a step has sampled becomes the sequences' tokens and the clients' deltas."""

from __future__ import annotations

import time

from engine.accounting import Accounts
from engine.beams.group import BeamGroup
from engine.errors import QuireError
from engine.exits import Exits
from engine.outputs import delta_of
from engine.protocol import TokenDelta, TokenLogprobs
from engine.scheduler import Scheduler, Sequence, StepPlan, StepResult
from engine.structured.manager import StructuredOutputs


class Harvest:
    """Takes over the results of steps, in their order."""

    def __init__(
        self,
        scheduler: Scheduler,
        structured: StructuredOutputs,
        accounts: Accounts,
        exits: Exits,
    ) -> None:
        self._structured = structured
        self._accounts = accounts
        self._exits = exits
        self._scheduler = scheduler
        self._charge = scheduler.waiting.charge_output
        self._complete_beams: list[BeamGroup] = []

    def take(
        self, plan: StepPlan, scheduled: list[Sequence], result: StepResult
    ) -> list[TokenDelta]:
        """Append what was sampled, find what has ended, and make the deltas.

        `scheduled` are the plan's sequences in its order. One that has ended since the plan was
        made gets nothing more.
        """
        deltas: list[TokenDelta] = []
        special = bool(
            result.prompt_logprobs or result.errors or result.pooled or result.candidates
        )
        logprobs = result.logprobs
        for at, (sequence, token_id) in enumerate(zip(scheduled, result.token_ids, strict=True)):
            sequence.isolated = False
            if sequence.finished:
                continue
            if special:
                deltas += self._special(sequence, plan, result)
            if token_id >= 0:
                scores = logprobs[at] if logprobs else None
                deltas += self._token(sequence, token_id, scores, plan)
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
            return [self._exits.complete(sequence, pooled)]
        beams, candidates = sequence.request.beams, result.candidates.get(seq_id)
        if beams is not None and candidates is not None:
            self._charge(sequence)
            complete = beams.take(sequence, candidates, plan, self._scheduler)
            # One that was preempted after it had its candidates brings them once more.
            if complete and beams not in self._complete_beams:
                self._complete_beams.append(beams)
        return []

    def _token(
        self, sequence: Sequence, token_id: int, scores: TokenLogprobs | None, plan: StepPlan
    ) -> list[TokenDelta]:
        """A sequence's new token, and what its grammar adds."""
        if sequence.num_placeholders:
            sequence.num_placeholders -= 1
        token_ids = [token_id]
        if sequence.grammar is not None:
            try:
                token_ids = self._structured.follow(sequence, token_id, plan)
            except QuireError as error:
                return self._exits.refuse(sequence, error)
        request = sequence.request
        if request.tokens_left is not None:
            token_ids = token_ids[: request.tokens_left]
            request.tokens_left -= len(token_ids)
        self._accounts.stats.generation_tokens_total += len(token_ids)
        self._charge(sequence)
        first = sequence.first_token_at == 0.0
        if first:
            sequence.first_token_at = time.time()
        sequence.token_ids += token_ids
        ended = self._exits.reason(sequence, token_ids[-1])
        if ended is not None:
            self._exits.leave(sequence, *ended)
        elif request.tokens_left == 0:
            self._exits.leave(sequence, "budget")
        deltas = [delta_of(sequence, token_ids, scores, first=first)]
        if request.tokens_left == 0:
            for other in request.sequences:
                if not other.finished:
                    deltas += self._exits.finish(other, "budget")
        return deltas
