"""Turns one output's token deltas into text, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from engine.contract.outputs import CompletionOutput, FlatLogprobs, Logprob
from engine.contract.protocol import TokenDelta, TokenLogprobs
from engine.contract.sampling_params import SamplingParams
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.stop import StopChecker
from engine.text.tokenizer import Tokenizer


class OutputAssembler:
    """Collects one output: tokens, log probabilities and text."""

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

    def push(self, delta: TokenDelta) -> bool:
        """Take a delta over; True when a stop string ends the output here, not the engine."""
        output = self.output
        if output.finished:
            return False
        # EOS itself never shows in the text, unless it's asked for as the stop string it is.
        by_eos = (
            delta.finish_reason == "stop"
            and delta.stop_reason is None
            and not self._params.include_stop_str_in_output
        )
        if delta.cumulative_logprob is not None:
            output.cumulative_logprob = delta.cumulative_logprob
        for at, token_id in enumerate(delta.token_ids):
            output.token_ids.append(token_id)
            if delta.logprobs is not None:
                self._add_logprobs(delta.logprobs[at])
            hidden = by_eos and at == len(delta.token_ids) - 1
            if self._text is not None and not hidden and self._add_text(self._text, token_id):
                return True
        if delta.finish_reason is not None:
            self.finish(delta.finish_reason, delta.stop_reason)
        return False

    def _add_text(self, text: IncrementalDetokenizer, token_id: int) -> bool:
        """Add a token's text; True when it completes a stop string."""
        may_stop = len(self.output.token_ids) >= self._params.min_tokens
        safe, stopped = self._stop.push(text.push([token_id]), may_stop)
        self.output.text += safe
        if stopped is not None:
            self.output.finish_reason, self.output.stop_reason = "stop", stopped
        return stopped is not None

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """The engine's end: what was held back is text after all, or a last stop string."""
        output = self.output
        output.finish_reason, output.stop_reason = reason, stop_reason
        if self._text is None:
            return
        safe, stopped = self._stop.push(self._text.flush())
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
    """One position's log probabilities by token id, with their texts."""
    texts = _texts(scores, tokenizer)
    entries = map(Logprob, scores.logprobs, scores.ranks, texts)
    return dict(zip(scores.token_ids, entries, strict=True))


def flat_entry(
    flat: FlatLogprobs, scores: TokenLogprobs | None, tokenizer: Tokenizer | None
) -> None:
    """Add one position's log probabilities to `flat`; None for a position without."""
    if scores is None:
        flat.append(None)
    else:
        texts = _texts(scores, tokenizer)
        flat.append_lists(scores.token_ids, scores.logprobs, scores.ranks, texts)


def _texts(scores: TokenLogprobs, tokenizer: Tokenizer | None) -> Sequence[str | None]:
    if tokenizer is None:
        return [None] * len(scores.token_ids)
    return [tokenizer.decode([token], False) for token in scores.token_ids]
