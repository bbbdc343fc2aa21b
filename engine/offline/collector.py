"""`Collector`: what comes of one offline request, put together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from engine.contract.errors import QuireError
from engine.contract.output_kind import RequestOutputKind
from engine.contract.outputs import (
    CompletionOutput,
    FlatLogprobs,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from engine.contract.protocol import FlightRecord, TokenDelta, TokenLogprobs
from engine.contract.sampling_params import SamplingParams
from engine.offline.assembler import OutputAssembler, flat_entry, logprob_entry
from engine.offline.news import Told
from engine.offline.request_figures import RequestFigures
from engine.text.tokenizer import Tokenizer


class Collector:
    """Gathers one request's outputs.

    Args:
        text, token_ids: the prompt's. params: as the caller gave them. figures: where it's counted.
    """

    def __init__(
        self,
        request_id: str,
        text: str | None,
        token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        arrival_time: float | None = None,
        figures: RequestFigures | None = None,
    ) -> None:
        self.request_id = request_id
        self._figures = figures or RequestFigures()
        self._began: float | None = None
        self._last: float | None = None
        self._text, self._token_ids = text, token_ids
        self._tokenizer = tokenizer
        self._assemblers = [
            OutputAssembler(index, token_ids, params, tokenizer)
            for index in range(params.num_sequences)
        ]
        self._params = params
        self._told = Told()
        self._prompt_logprobs: list[dict[int, Logprob] | None] | FlatLogprobs | None = None
        self._cached = 0
        self._flights: dict[int, FlightRecord] = {}
        self._metrics = RequestMetrics(time.time() if arrival_time is None else arrival_time)
        self.error: QuireError | None = None

    def push(self, delta: TokenDelta) -> bool:
        """Take a delta over; True when a stop string ended the output and the engine should stop
        it. An error of the engine's ends all outputs and is kept in `error`.
        """
        if self.error is not None:  # another output failed in the same step
            return False
        if delta.error is not None:
            self.error = delta.error.to_error()
            for each in self._assemblers:
                if not each.output.finished:
                    each.finish("error")
            return False
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = self._entries(delta.prompt_logprobs)
        if delta.num_prompt_tokens and delta.index == 0:
            self._cached = delta.num_cached_tokens
        self._note(delta)
        stopped = self._assemblers[delta.index].push(delta)
        if self.finished and self._last is not None and self._began is not None:
            arrival, tokens = self._metrics.arrival_time, self._metrics.num_generation_tokens
            self._figures.end(arrival, self._began, self._last, len(self._token_ids), tokens)
            self._last = None
        return stopped

    def _note(self, delta: TokenDelta) -> None:
        """When it happened. The engine's own times come with the end."""
        metrics, now = self._metrics, time.time()
        metrics.num_generation_tokens += len(delta.token_ids)
        if delta.token_ids:
            if delta.index == 0:
                self._figures.token(metrics.arrival_time, self._last, now)
            self._began, self._last = self._began or now, now
        if delta.index == 0 and delta.token_ids:
            metrics.first_token_ts = metrics.first_token_ts or now
            metrics.last_token_ts = now
        if delta.flight is not None:
            self._flights[delta.index] = delta.flight
        if delta.flight is not None and delta.index == 0:
            metrics.scheduled_ts = metrics.arrival_time + delta.flight.queue_time
            metrics.first_token_ts = metrics.scheduled_ts + delta.flight.prefill_time
            metrics.last_token_ts = metrics.first_token_ts + delta.flight.decode_time

    def _entries(
        self, positions: Sequence[TokenLogprobs | None]
    ) -> list[dict[int, Logprob] | None] | FlatLogprobs:
        if not self._params.flat_logprobs:
            entry, tokenizer = logprob_entry, self._tokenizer
            return [None if each is None else entry(each, tokenizer) for each in positions]
        flat = FlatLogprobs()
        for scores in positions:
            flat_entry(flat, scores, self._tokenizer)
        return flat

    @property
    def finished(self) -> bool:
        """Whether all outputs have ended."""
        return self.error is not None or all(each.output.finished for each in self._assemblers)

    def result(self) -> RequestOutput:
        """The request's result so far; with best_of, at the end the n likeliest outputs.

        Its own from here on: what comes later changes nothing in it.
        """
        finished = self.finished
        outputs = [_copy(assembler.output) for assembler in self._assemblers]
        if len(outputs) > self._params.n:
            outputs = self._best(outputs) if finished else outputs[: self._params.n]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._text,
            prompt_token_ids=self._token_ids,
            outputs=outputs,
            prompt_logprobs=self._prompt_logprobs,
            num_cached_tokens=self._cached,
            finished=finished,
            flights=[flight for _, flight in sorted(self._flights.items())],
            metrics=replace(self._metrics),
            error=self.error,
        )

    def handed_over(self) -> RequestOutput | None:
        """What `output_kind` wants told now; None for nothing yet."""
        kind = self._params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY and not self.finished:
            return None
        result = self.result()
        return self._told.news(result) if kind is RequestOutputKind.DELTA else result

    def _best(self, outputs: list[CompletionOutput]) -> list[CompletionOutput]:
        """The n best of best_of, best first."""
        ranked = sorted(outputs, key=lambda output: -(output.cumulative_logprob or 0.0))
        best = ranked[: self._params.n]
        for index, output in enumerate(best):
            output.index = index
            if self._params.logprobs is None:
                output.logprobs = None
        return best


def _copy(output: CompletionOutput) -> CompletionOutput:
    logprobs = None if output.logprobs is None else output.logprobs.copy()
    return replace(output, token_ids=list(output.token_ids), logprobs=logprobs)
