"""`OutputState`: turns one output's tokens into text and detects its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.contract.messages import TokenLogprobs
from engine.contract.sampling_params import SamplingParams
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.stop_strings import StopChecker
from engine.text.tokenizer import Tokenizer
from inference.engine_client.mailbox import TokenChunk
from metering.access import MAX_POINTS

#: Engine's finish reason that OpenAI's clients don't know -> its `finish_reason`, `stop_reason`.
_EDGE_REASONS = {
    "budget": ("length", "budget"),
    "repetition": ("stop", "repetition_detected"),
}


@dataclass(slots=True)
class TokenEntry:
    """A token with its log probabilities and its position in the output's text.

    Attributes:
        offset: number of characters completed before it.
        in_text: whether the text includes it; special tokens, EOS and stop strings are left out.
    """

    token_id: int
    logprobs: TokenLogprobs
    offset: int
    in_text: bool = True


@dataclass(slots=True)
class OutputDelta:
    """Increment of one output, ready for an endpoint to write.

    Attributes:
        number, index: index of the prompt, and of the output for that prompt.
        text: never part of a character or of a stop string.
        token_ids: tokens since the last increment. entries: theirs, if logprobs were requested.
        finish_reason: "stop" or "length" in the last increment. stop_reason: the stop string or id;
            "budget" if the tenant's reservation ended the output, "repetition_detected" if
            `repetition_detection` did.
        prompt_logprobs: in one increment, if requested.
    """

    number: int
    index: int
    text: str
    token_ids: list[int] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class TokenFormatter:
    """Writes tokens as text, or as `token_id:N` if the client requested that."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self.tokenizer, self._as_ids = tokenizer, as_ids

    def __call__(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self.tokenizer.token_text(token_id)


class TokenTimeline:
    """Times at which tokens arrived: at most `MAX_POINTS` points, however many tokens."""

    __slots__ = ("_last", "_points", "_skipped", "_stride", "total")

    def __init__(self) -> None:
        self.total = 0
        self._points: list[tuple[float, int]] = []
        self._stride, self._skipped = 1, 0
        self._last = (0.0, 0)

    def add(self, seconds: float, count: int) -> None:
        """Record `count` more tokens."""
        self.total += count
        self._last = (seconds, self.total)
        self._skipped += 1
        if self._skipped < self._stride:
            return
        self._skipped = 0
        self._points.append(self._last)
        if len(self._points) >= MAX_POINTS:
            self._points = self._points[1::2]
            self._stride *= 2

    def since(self, start: float) -> list[tuple[int, int]]:
        """Return [milliseconds after `start`, tokens so far], including the last point."""
        points = list(self._points)
        if self.total and (not points or points[-1] != self._last):
            points.append(self._last)
        return [(round((seconds - start) * 1000), total) for seconds, total in points]


class OutputState:
    """Detokenizes and detects stop strings, independently of how tokens are chunked.

    Attributes:
        num_tokens: number of tokens so far, up to the end of a stop string.
        sum_logprobs: sum of their log probabilities, if the engine sends them.
        finish_reason: None while running.
        engine_reason: the engine's finish reason, which may differ ("budget", "repetition").
    """

    __slots__ = (
        "_by_token",
        "_detokenizer",
        "_entries",
        "_from",
        "_sampling",
        "_stop",
        "_text_len",
        "_token_ids",
        "_visible_len",
        "engine_reason",
        "finish_reason",
        "index",
        "num_tokens",
        "number",
        "stop_reason",
        "sum_logprobs",
    )

    def __init__(
        self,
        number: int,
        index: int,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        sampling: SamplingParams,
        preserved_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.number, self.index = number, index
        self._sampling = sampling
        self._from = tokenizer, prompt, preserved_token_ids
        self._detokenizer: IncrementalDetokenizer | None = None
        self._stop = (
            StopChecker(list(sampling.stop), sampling.include_stop_str_in_output)
            if sampling.stop
            else None
        )
        # Only stop strings and logprobs require knowing which token produced which text.
        self._by_token = self._stop is not None or sampling.logprobs is not None
        self._entries: list[TokenEntry] = []
        self._token_ids: list[int] = []
        self._text_len = self._visible_len = 0
        self.num_tokens = 0
        self.sum_logprobs = 0.0
        self.finish_reason: str | None = None
        self.engine_reason: str | None = None
        self.stop_reason: int | str | None = None

    @property
    def _text(self) -> IncrementalDetokenizer:
        """Created with the first token, so that thousands aren't created at once."""
        if self._detokenizer is None:
            tokenizer, prompt, preserved_token_ids = self._from
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                prompt,
                skip_special_tokens=self._sampling.skip_special_tokens,
                spaces_between_special_tokens=self._sampling.spaces_between_special_tokens,
                preserved_token_ids=preserved_token_ids,
            )
        return self._detokenizer

    def push(self, chunk: TokenChunk) -> OutputDelta | None:
        """Return a chunk's increment; None while there is no text to emit (half a character)."""
        text = self._append_tokens(chunk)
        if self.finish_reason is None and chunk.finish_reason is not None:
            text += self._finish(chunk)
        if not text and self.finish_reason is None and chunk.prompt_logprobs is None:
            return None
        num_ready = self._num_ready()
        increment = OutputDelta(
            self.number,
            self.index,
            text,
            self._token_ids[:num_ready],
            self._entries[:num_ready],
            self.finish_reason,
            self.stop_reason,
            chunk.prompt_logprobs,
        )
        if num_ready is None:
            self._token_ids, self._entries = [], []
        else:
            del self._token_ids[:num_ready], self._entries[:num_ready]
        return increment

    def _num_ready(self) -> int | None:
        """Number of tokens whose text can no longer be part of a stop string; None: all."""
        if self._stop is None or self.finish_reason is not None or not self._entries:
            return None
        if self._visible_len == self._text_len:
            return None
        return sum(entry.offset < self._visible_len for entry in self._entries)

    def _append_tokens(self, chunk: TokenChunk) -> str:
        token_ids = chunk.token_ids
        hidden = self._hidden_stop_token(chunk)
        if not self._by_token:
            self._token_ids.extend(token_ids)
            self.num_tokens += len(token_ids)
            return self._text.push(token_ids[:-1] if hidden else token_ids)
        text = ""
        last = len(token_ids) - 1
        for index, token in enumerate(token_ids):
            is_end = hidden and index == last
            in_text = not is_end and not self._is_left_out(token)
            self._append_logprobs(token, chunk.logprobs[index] if chunk.logprobs else None, in_text)
            new = "" if is_end else self._text.push((token,))
            self._text_len += len(new)
            text += self._check_stop(new)
            if self.finish_reason is not None:
                break
        return text

    def _is_left_out(self, token: int) -> bool:
        """Whether this is a special token that the text omits."""
        tokenizer, _, preserved_token_ids = self._from
        special = self._sampling.skip_special_tokens and token in tokenizer.special_token_ids
        return special and token not in preserved_token_ids

    def _append_logprobs(self, token: int, logprobs: TokenLogprobs | None, in_text: bool) -> None:
        self.num_tokens += 1
        self._token_ids.append(token)
        if logprobs is not None:
            self.sum_logprobs += logprobs.logprobs[0]
            self._entries.append(TokenEntry(token, logprobs, self._text_len, in_text))

    def _check_stop(self, text: str) -> str:
        """Return the part of new text to emit; a stop string ends the output."""
        if self._stop is None:
            return text
        may_stop = self.num_tokens >= self._sampling.min_tokens
        visible, matched = self._stop.append(text, may_stop)
        self._visible_len += len(visible)
        if matched is not None:
            self.finish_reason, self.stop_reason = "stop", matched
            for entry in self._entries:
                entry.in_text = entry.in_text and entry.offset < self._visible_len
        return visible

    def _hidden_stop_token(self, chunk: TokenChunk) -> bool:
        """Whether the chunk ends with EOS, which the text omits unless the request includes it."""
        by_eos = chunk.finish_reason == "stop" and chunk.stop_reason is None
        return by_eos and bool(chunk.token_ids) and not self._sampling.include_stop_str_in_output

    def _finish(self, chunk: TokenChunk) -> str:
        """Return the text held back so far, since the engine has ended the output."""
        text = self._check_stop(self._text.flush())
        if self.finish_reason is None:
            engine_reasons = (chunk.finish_reason or "", chunk.stop_reason)
            self.finish_reason, self.stop_reason = _EDGE_REASONS.get(
                engine_reasons[0], engine_reasons
            )
            self.engine_reason = chunk.finish_reason
        if self._stop is not None:
            text += self._stop.flush()
        return text


@dataclass(slots=True)
class Collected:
    """All increments of an output so far; fields as in `OutputDelta`."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def append(self, increment: OutputDelta) -> None:
        self.text += increment.text
        self.token_ids += increment.token_ids
        self.entries += increment.entries
        self.finish_reason, self.stop_reason = increment.finish_reason, increment.stop_reason
