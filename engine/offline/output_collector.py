"""`RequestOutputCollector`: assembles the outputs of an offline request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.contract.errors import EngineFault, QuireError
from engine.contract.lora import LoRARequest
from engine.contract.messages import FlightRecord, TokenDelta, TokenLogprobs
from engine.contract.sampling_fields import RequestOutputKind
from engine.contract.sampling_params import SamplingParams
from engine.offline.metrics import RequestMetricsCollector
from engine.offline.outputs import (
    CompletionOutput,
    FlatLogprobs,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.stop_strings import StopChecker
from engine.text.tokenizer import Tokenizer


class OutputAssembler:
    """Assembles an output: tokens, log probabilities and text."""

    def __init__(
        self,
        index: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.output = CompletionOutput(index)
        self._params = params
        self._tokenizer = tokenizer
        self._text: IncrementalDetokenizer | None = None
        self._stop = StopChecker(params.stop or (), params.include_stop_str_in_output)
        if tokenizer is not None and params.detokenize:
            self._text = IncrementalDetokenizer(
                tokenizer,
                prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )

    def append(self, delta: TokenDelta) -> bool:
        """Add a delta. Returns True if a stop string ended the output before the engine did."""
        output = self.output
        if output.finished:
            return False
        # EOS isn't part of the text without include_stop_str_in_output.
        by_eos = (
            delta.finish_reason == "stop"
            and delta.stop_reason is None
            and not self._params.include_stop_str_in_output
        )
        if delta.cumulative_logprob is not None:
            output.cumulative_logprob = delta.cumulative_logprob
        for index, token_id in enumerate(delta.token_ids):
            output.token_ids.append(token_id)
            if delta.logprobs is not None:
                self._add_logprobs(delta.logprobs[index])
            hidden = by_eos and index == len(delta.token_ids) - 1
            if self._text is not None and not hidden and self._add_text(self._text, token_id):
                return True
        if delta.finish_reason is not None:
            self.finish(delta.finish_reason, delta.stop_reason)
        return False

    def _add_text(self, text: IncrementalDetokenizer, token_id: int) -> bool:
        """Add a token's text. Returns True if it completes a stop string."""
        may_stop = len(self.output.token_ids) >= self._params.min_tokens
        safe, stopped = self._stop.append(text.push([token_id]), may_stop)
        self.output.text += safe
        if stopped is not None:
            self.output.finish_reason, self.output.stop_reason = "stop", stopped
        return stopped is not None

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """Finish the output for the engine's reason. Text that was held back is added, and can
        still contain a stop string.
        """
        output = self.output
        output.finish_reason, output.stop_reason = reason, stop_reason
        if self._text is None:
            return
        safe, stopped = self._stop.append(self._text.flush())
        output.text += safe + self._stop.flush()
        if stopped is not None:
            output.finish_reason, output.stop_reason = "stop", stopped

    def _add_logprobs(self, scores: TokenLogprobs) -> None:
        output = self.output
        if output.logprobs is None:
            flat = self._params.flat_logprobs
            output.logprobs, output.cumulative_logprob = FlatLogprobs() if flat else [], 0.0
        if isinstance(output.logprobs, FlatLogprobs):
            flat_entry(output.logprobs, scores, self._tokenizer)
        else:
            output.logprobs.append(logprob_entry(scores, self._tokenizer))
        output.cumulative_logprob = (output.cumulative_logprob or 0.0) + scores.logprobs[0]


def logprob_entry(scores: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """Return a position's log probabilities by token id, with the tokens' texts."""
    texts = _texts(scores, tokenizer)
    entries = map(Logprob, scores.logprobs, scores.ranks, texts)
    return dict(zip(scores.token_ids, entries, strict=True))


def flat_entry(
    flat: FlatLogprobs, scores: TokenLogprobs | None, tokenizer: Tokenizer | None
) -> None:
    """Append a position's log probabilities to `flat`; None for a position without any."""
    if scores is None:
        flat.append(None)
    else:
        texts = _texts(scores, tokenizer)
        flat.append_lists(scores.token_ids, scores.logprobs, scores.ranks, texts)


def _texts(scores: TokenLogprobs, tokenizer: Tokenizer | None) -> Sequence[str | None]:
    if tokenizer is None:
        return [None] * len(scores.token_ids)
    return [tokenizer.decode([token], False) for token in scores.token_ids]


@dataclass(slots=True)
class _Position:
    """How much of an output has been delivered."""

    tokens: int = 0
    chars: int = 0
    finished: bool = False


@dataclass(slots=True)
class DeltaTracker:
    """The parts of each output and of the prompt's log probabilities that have been delivered."""

    marks: dict[int, _Position] = field(default_factory=dict)
    prompt: bool = False

    def diff(self, result: RequestOutput) -> RequestOutput:
        """Return the outputs with new content, and only that content. `cumulative_logprob` is still
        that of all tokens. The prompt's log probabilities are returned once.
        """
        outputs = [new for output in result.outputs if (new := self._new(output)) is not None]
        scores = None if self.prompt else result.prompt_logprobs
        self.prompt = self.prompt or scores is not None
        return replace(result, outputs=outputs, prompt_logprobs=scores)

    def _new(self, output: CompletionOutput) -> CompletionOutput | None:
        mark = self.marks.setdefault(output.index, _Position())
        previous = replace(mark)
        mark.tokens, mark.chars = len(output.token_ids), len(output.text)
        mark.finished = output.finished
        if mark == previous:
            return None
        return replace(
            output,
            text=output.text[previous.chars :],
            token_ids=output.token_ids[previous.tokens :],
            logprobs=None if output.logprobs is None else output.logprobs[previous.tokens :],
        )


class RequestOutputCollector:
    """Collects a request's outputs.

    Args:
        text, token_ids: those of the prompt.
        params: the caller's parameters.
        figures: metrics to update.
        encoder_prompt: text and token ids of a text encoder's prompt.
    """

    def __init__(
        self,
        request_id: str,
        text: str | None,
        token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        arrival_time: float | None = None,
        figures: RequestMetricsCollector | None = None,
        lora_request: LoRARequest | None = None,
        encoder_prompt: tuple[str | None, list[int] | None] = (None, None),
    ) -> None:
        self.request_id, self._lora_request = request_id, lora_request
        self._encoder_prompt = encoder_prompt
        self._figures = figures or RequestMetricsCollector()
        self._began: float | None = None
        self._last: float | None = None
        self._text, self._token_ids = text, token_ids
        self._tokenizer = tokenizer
        self._assemblers = [
            OutputAssembler(index, token_ids, params, tokenizer)
            for index in range(params.num_sequences)
        ]
        self._params = params
        self._deltas = DeltaTracker()
        self._prompt_logprobs: list[dict[int, Logprob] | None] | FlatLogprobs | None = None
        self._cached = 0
        self._flights: dict[int, FlightRecord] = {}
        self._metrics = RequestMetrics(time.time() if arrival_time is None else arrival_time)
        self.error: QuireError | None = None

    def push(self, delta: TokenDelta) -> bool:
        """Add a delta. Returns True if a stop string ended the output, so that the engine must stop
        it. An error of the engine or the tokenizer ends all outputs and is stored in `error`.
        """
        if self.error is not None:  # another output failed in the same step
            return False
        if delta.error is not None:
            self.error = delta.error.to_error()
            for assembler in self._assemblers:
                if not assembler.output.finished:
                    assembler.finish("error")
            return False
        if delta.num_prompt_tokens and delta.index == 0:
            self._cached = delta.num_cached_tokens
        self._record_times(delta)
        try:
            if delta.prompt_logprobs is not None:
                self._prompt_logprobs = self._entries(delta.prompt_logprobs)
            stopped = self._assemblers[delta.index].append(delta)
        except EngineFault as error:  # the tokenizer can't decode these tokens
            self.error = error
            for assembler in self._assemblers:
                if not assembler.output.finished:
                    assembler.output.finish_reason = "error"
            return False
        if self.finished and self._last is not None and self._began is not None:
            arrival, tokens = self._metrics.arrival_time, self._metrics.num_generation_tokens
            self._figures.end(arrival, self._began, self._last, len(self._token_ids), tokens)
            self._last = None
        return stopped

    def _record_times(self, delta: TokenDelta) -> None:
        """Record the times of events. The last delta has the engine's times, which replace them."""
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
            return [None if scores is None else entry(scores, tokenizer) for scores in positions]
        flat = FlatLogprobs()
        for scores in positions:
            flat_entry(flat, scores, self._tokenizer)
        return flat

    @property
    def finished(self) -> bool:
        return self.error is not None or all(
            assembler.output.finished for assembler in self._assemblers
        )

    def result(self) -> RequestOutput:
        """Return the result so far; with best_of, once finished, the n most likely outputs.

        It is a copy that later deltas don't change.
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
            lora_request=self._lora_request,
            encoder_prompt=self._encoder_prompt[0],
            encoder_prompt_token_ids=self._encoder_prompt[1],
        )

    def pop_delta(self) -> RequestOutput | None:
        """Return the result to deliver now according to `output_kind`, or None."""
        kind = self._params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY and not self.finished:
            return None
        result = self.result()
        return self._deltas.diff(result) if kind is RequestOutputKind.DELTA else result

    def _best(self, outputs: list[CompletionOutput]) -> list[CompletionOutput]:
        """Return the n most likely of best_of outputs, in descending order."""
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
