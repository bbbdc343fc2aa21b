"""Words of a transcript and their times, by OpenAI's rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.contract.errors import EngineFault
from engine.contract.pooling_params import ALIGN, PoolingParams, from_bytes
from inference.api.audio.segments import TIME_STEP, Segment, WindowText, Word
from inference.api.pooling.job import PoolingJob

#: Languages without spaces between words: each character counts as a word.
UNSPACED_LANGUAGES = frozenset({"ja", "lo", "my", "th", "yue", "zh"})
#: Punctuation that belongs to the next word, and to the previous one.
_OPENING = frozenset("\"'“¿([{-")
_CLOSING = frozenset("\"'.。,，!！?？:：”)]}、")


class AlignmentJob(PoolingJob):
    """Aligns the tokens of windows' texts with the audio."""

    async def check(self) -> None:
        """Raise `InvalidRequest` for what the caller may not do."""
        self.check_context()
        self.check_priority()


def alignment_params(prompt: Sequence[int], window_seconds: float) -> PoolingParams:
    """Parameters to align a text after `prompt`: a token is located by the attention of the
    token before it, from which it is predicted.
    """
    return PoolingParams(
        task=ALIGN, align_from=len(prompt) - 1, num_states=max(1, round(window_seconds / TIME_STEP))
    )


def token_boundaries(result: bytes, num_tokens: int) -> list[float]:
    """Seconds of the window at which each token begins, and at which the last one ends.

    Raises `EngineFault` if the result is of a different length.
    """
    times: list[float] = from_bytes(result).tolist()
    if len(times) != num_tokens + 1:
        raise EngineFault(f"The engine aligned {len(times) - 1} of {num_tokens} tokens.")
    return times


def split_words(
    tokens: Sequence[int], token_bytes: Callable[[int], bytes], *, spaced: bool
) -> list[tuple[str, int]]:
    """(text, number of tokens) of each word, with its punctuation and the space before it."""
    words: list[tuple[str, int]] = []
    for text, count in _complete_characters(tokens, token_bytes):
        if words and spaced and not text.startswith(" "):
            previous, previous_count = words[-1]
            words[-1] = previous + text, previous_count + count
        else:
            words.append((text, count))
    return _merge_marks(words)


def _complete_characters(
    tokens: Sequence[int], token_bytes: Callable[[int], bytes]
) -> list[tuple[str, int]]:
    """Split into as few tokens as contain whole characters; the last may end inside a character."""
    texts: list[tuple[str, int]] = []
    data, count = b"", 0
    for token in tokens:
        data, count = data + token_bytes(token), count + 1
        try:
            texts.append((data.decode(), count))
        except UnicodeDecodeError:
            continue
        data, count = b"", 0
    if count:
        texts.append((data.decode(errors="replace"), count))
    return texts


def _merge_marks(words: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Merge separate punctuation with the words that it belongs to."""
    merged: list[tuple[str, int]] = []
    opening = "", 0
    for text, count in words:
        marks = set(text.strip())
        if marks <= _CLOSING and merged and not opening[1]:
            previous, previous_count = merged[-1]
            merged[-1] = previous + text, previous_count + count
            continue
        text, count = opening[0] + text, opening[1] + count
        opening = "", 0
        if marks <= _OPENING:
            opening = text, count
        else:
            merged.append((text, count))
    return [*merged, opening] if opening[1] else merged


def words_of_segment(
    segment: Segment, words: Sequence[tuple[str, int]], boundaries: Sequence[float]
) -> list[Word]:
    """The words of a segment.

    Args:
        words: as `split_words` gives them.
        boundaries: seconds of the file at which each of its tokens begins, and the last one ends.
    """
    timed: list[Word] = []
    token = 0
    for text, count in words:
        start, end = boundaries[token], boundaries[token + count]
        token += count
        if text.strip():
            timed.append(Word(text.strip(), start, end))
    if timed:
        # The alignment may extend into the silence around a segment, which isn't speech.
        first, last = timed[0], timed[-1]
        first.start = max(first.start, min(segment.start, first.end))
        last.end = min(last.end, max(segment.end, last.start))
    return timed


def verbose_words(windows: Sequence[WindowText]) -> list[dict[str, Any]]:
    """OpenAI's word objects."""
    return [
        {"word": word.text, "start": round(word.start, 2), "end": round(word.end, 2)}
        for window in windows
        for word in window.words
    ]
