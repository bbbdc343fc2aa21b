"""What a step has sampled becomes the sequences' tokens and the clients' deltas."""

from __future__ import annotations

import time

from engine.accounting import Accounts
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
        self._charge = scheduler.waiting.charge_output

    def take(
        self, plan: StepPlan, scheduled: list[Sequence], result: StepResult
    ) -> list[TokenDelta]:
        """Append what was sampled, find what has ended, and make the deltas.

        `scheduled` are the plan's sequences in its order. One that has ended since the plan was
        made gets nothing more.
        """
        deltas: list[TokenDelta] = []
        special = bool(result.prompt_logprobs or result.errors or result.pooled)
        logprobs = result.logprobs
        for at, (sequence, token_id) in enumerate(zip(scheduled, result.token_ids, strict=True)):
            sequence.isolated = False
            if sequence.finished:
                continue
            if special and (end := self._special(sequence, result)) is not None:
                deltas.append(end)
            elif token_id >= 0:
                scores = logprobs[at] if logprobs else None
                deltas.append(self._token(sequence, token_id, scores, plan))
        return deltas

    def _special(self, sequence: Sequence, result: StepResult) -> TokenDelta | None:
        """Prompt logprobs, which wait for the first token; the end of what failed or was pooled."""
        if scores := result.prompt_logprobs.get(sequence.seq_id):
            sequence.prompt_logprobs = [*(sequence.prompt_logprobs or []), *scores]
        if reason := result.errors.get(sequence.seq_id):
            return self._exits.fail(sequence, reason)
        if pooled := result.pooled.get(sequence.seq_id):
            return self._exits.complete(sequence, pooled)
        return None

    def _token(
        self, sequence: Sequence, token_id: int, scores: TokenLogprobs | None, plan: StepPlan
    ) -> TokenDelta:
        """A sequence's new token, and what its grammar adds."""
        if sequence.num_placeholders:
            sequence.num_placeholders -= 1
        token_ids = [token_id]
        if sequence.grammar is not None:
            try:
                token_ids = self._structured.follow(sequence, token_id, plan)
            except QuireError as error:
                return self._exits.refuse(sequence, error)
        self._accounts.stats.generation_tokens_total += len(token_ids)
        self._charge(sequence)
        first = sequence.first_token_at == 0.0
        if first:
            sequence.first_token_at = time.time()
        sequence.token_ids += token_ids
        ended = self._exits.reason(sequence, token_ids[-1])
        if ended is not None:
            self._exits.leave(sequence, *ended)
        return delta_of(sequence, token_ids, scores, first=first)
