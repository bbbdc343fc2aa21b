"""How sequences end, and how they leave the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from engine.beams.group import BeamGroup
from engine.contract.errors import QuireError
from engine.contract.protocol import TokenDelta
from engine.core.counters import EngineCounters
from engine.core.deltas import delta_of, error_delta, pooled_delta, refusal_delta
from engine.scheduler import Request, Scheduler, Sequence
from engine.structured.structured_outputs import StructuredOutputManager


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
        counters: EngineCounters,
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

    def reason(self, sequence: Sequence, token_id: int) -> tuple[str, int | None] | None:
        """(finish reason, stop token id) when this token, its last, ends the sequence."""
        params = sequence.request.message.sampling
        generated = len(sequence.token_ids) - sequence.num_prompt_tokens
        if self._grammars and (grammar := self._grammars.get(sequence.seq_id)) is not None:
            ends = token_id in self.eos or token_id in grammar.own_ends
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
        if circles is not None and not early and circles.found_in(sequence.token_ids, generated):
            return "repetition", None
        return None

    def leave(self, sequence: Sequence, reason: str, stop_reason: int | None = None) -> None:
        """Take a sequence out; forget its request when it was the last."""
        self._scheduler.finish(sequence, reason, stop_reason)
        self._structured.leave(sequence)
        self._counters.note_end(sequence, reason)
        request = sequence.request
        if request.finished:
            self._requests.pop(request.request_id, None)
            for handle in request.handles:
                self._detach(handle)
            self._on_end(request)
            if request.on_done is not None:
                request.on_done()
            request.let_go()

    def finish(self, sequence: Sequence, reason: str) -> list[TokenDelta]:
        """End a sequence from outside."""
        return [
            delta_of(each, [], None, first=each.first_token_at == 0.0)
            for each in self._end(sequence, reason)
        ]

    def fail(self, sequence: Sequence, reason: str) -> list[TokenDelta]:
        """End a sequence with an error that its client sees."""
        return [error_delta(each, reason) for each in self._end(sequence, "error")]

    def refuse(self, sequence: Sequence, error: QuireError) -> list[TokenDelta]:
        """End a sequence for a reason that lies in its request."""
        return [refusal_delta(each, error) for each in self._end(sequence, "error")]

    def complete(self, sequence: Sequence, pooled: bytes) -> TokenDelta:
        """End a sequence whose prompt has been pooled."""
        sequence.first_token_at = time.time()
        self.leave(sequence, "stop")
        return pooled_delta(sequence, pooled)

    def complete_search(self, beams: BeamGroup) -> list[TokenDelta]:
        """End the beams of a search that is over."""
        deltas = beams.deltas()
        now = time.time()
        for place, sequence in enumerate(beams.request.sequences):
            sequence.first_token_at = now
            reason = deltas[place].finish_reason if place < len(deltas) else None
            self.leave(sequence, reason or "stop")
        self._counters.stats.generation_tokens_total += sum(len(d.token_ids) for d in deltas)
        return deltas

    def _end(self, sequence: Sequence, reason: str) -> list[Sequence]:
        """End a sequence; of a search, all beams. Returns one for each output that ends so."""
        if not sequence.request.searches:
            self.leave(sequence, reason)
            return [sequence]
        sequences = sequence.request.sequences
        for beam in sequences:
            self.leave(beam, reason)
            # A client has seen none of a beam's tokens.
            beam.token_ids = beam.token_ids[: beam.num_prompt_tokens]
        return sequences[: sequence.request.message.sampling.n]
