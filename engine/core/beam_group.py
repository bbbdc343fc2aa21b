"""`BeamGroup`: the beams of a request as sequences of the engine."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.messages import TokenDelta, TokenLogprobs
from engine.sampling.beam_search import BeamSearch, BeamStep, Hypothesis
from engine.scheduler import Request, Scheduler, Sequence, StepPlan


@dataclass(slots=True, eq=False)
class BeamRequest(Request):
    """A request whose sequences are the beams of one search."""

    #: Set once its sequences exist.
    beams: BeamGroup | None = None

    def clear_sequences(self) -> None:
        """Detach the group, too; see `Request`."""
        Request.clear_sequences(self)
        self.beams = None


class BeamGroup:
    """The sequences of a beam search, one per beam.

    A beam that continues with one token keeps its sequence and its blocks. If it continues with
    several, sequences of discarded beams are reused for the forks: they start anew, share its full
    blocks through the prefix cache, and recompute the rest of the last one.

    All beams must have their candidates before any can continue, so a beam that has them isn't
    scheduled meanwhile; if nothing else can run, its blocks are freed (`Scheduler.park_idle_beam`).
    """

    def __init__(
        self, request: Request, ends: frozenset[int], max_tokens: int, *, capped: bool
    ) -> None:
        """The beams are `request.sequences`, of which all but the first are parked.

        `capped`: `max_tokens` comes from the server's cap, not from the client.
        """
        params = request.message.sampling
        self.request = request
        self._capped = capped
        self.search = BeamSearch(
            params.beam_width,
            ends,
            max_tokens,
            params.length_penalty,
            params.early_stopping,
            params.logprobs,
        )
        #: The sequences of `search.running`, and the unused ones.
        self._live = request.sequences[:1]
        self._spare = request.sequences[1:]
        self._candidates: dict[int, TokenLogprobs] = {}
        #: Results of steps that were planned before the beams last advanced are ignored.
        self._moved_at = 0

    def process_candidates(
        self,
        sequence: Sequence,
        candidates: TokenLogprobs,
        plan: StepPlan,
        scheduler: Scheduler,
    ) -> bool:
        """Store a beam's candidates; True when all beams have theirs."""
        if plan.step <= self._moved_at:
            return False
        if sequence not in self._live:
            scheduler.park_beam(sequence)
            return False
        self._candidates[sequence.seq_id] = candidates
        return len(self._candidates) == len(self._live)

    def advance(self, scheduler: Scheduler) -> bool:
        """Advance all beams by one token; True when the search is complete."""
        candidates = [self._candidates[sequence.seq_id] for sequence in self._live]
        moves = self.search.advance(candidates)
        self._candidates.clear()
        self._moved_at = scheduler.num_steps
        if not self.search.done:
            self._apply_steps(moves, scheduler)
        return self.search.done

    def _apply_steps(self, moves: list[BeamStep], scheduler: Scheduler) -> None:
        old, self._live = self._live, []
        parents = {move.parent for move in moves}
        free = [
            old_sequence for index, old_sequence in enumerate(old) if index not in parents
        ] + self._spare
        forks: list[Sequence] = []
        stays: list[tuple[Sequence, int]] = []
        for parent, token_id in moves:
            sequence = old[parent]
            if parent in parents:
                parents.remove(parent)
                stays.append((sequence, token_id))
            else:
                sequence = free.pop()
                sequence.token_ids = [*old[parent].token_ids, token_id]
                sequence.block_hashes = old[parent].block_hashes.copy()
                forks.append(sequence)
            self._live.append(sequence)
        # Only now: forks are made from their parents' previous tokens.
        for sequence, token_id in stays:
            scheduler.append_token(sequence, token_id)
        for sequence in forks:
            scheduler.requeue(sequence)
        for sequence in free:
            scheduler.park_beam(sequence)
        self._spare = free

    def deltas(self) -> list[TokenDelta]:
        """The outputs, best first, as one delta each."""
        message = self.request.message
        first = self.request.sequences[0]
        outputs = self.search.outputs(message.sampling.n)
        deltas = [self._delta(index, hypothesis) for index, hypothesis in enumerate(outputs)]
        deltas[0].prompt_logprobs = first.prompt_logprobs
        return deltas

    def _delta(self, index: int, hypothesis: Hypothesis) -> TokenDelta:
        first = self.request.sequences[0]
        stops = self.request.message.sampling.stop_token_ids or ()
        last = hypothesis.token_ids[-1] if hypothesis.token_ids else -1
        reason = "stop"
        if hypothesis.by_length:
            reason = "budget" if self._capped else "length"
        return TokenDelta(
            request_id=self.request.request_id,
            index=index,
            token_ids=hypothesis.token_ids,
            logprobs=hypothesis.entries or None,
            finish_reason=reason,
            stop_reason=last if reason == "stop" and last in stops else None,
            cumulative_logprob=hypothesis.log_prob,
            num_prompt_tokens=first.num_prompt_tokens,
            num_cached_tokens=first.num_cached_tokens,
            flight=first.timeline,
        )
