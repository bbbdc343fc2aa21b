"""Splits a window's tokens into segments, and formats segments as text and subtitles."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Seconds between two of Whisper's timestamps.
TIME_STEP = 0.02
#: Minimum advance between windows in seconds, so that each stretch ends soon.
MIN_ADVANCE_S = 1.0


@dataclass(slots=True)
class Segment:
    """Text spoken between two times, in seconds of the file."""

    start: float
    end: float
    text: str
    tokens: list[int]


@dataclass(slots=True)
class Word:
    """A word with its punctuation and its times, in seconds of the file."""

    text: str
    start: float
    end: float


@dataclass(slots=True)
class WindowText:
    """The text of one window.

    Attributes:
        start, seconds: its position and length in the file.
        avg_logprob: mean log probability of its tokens, including the end token.
        no_speech_prob: probability of the token for "no speech".
        logprobs: for each token of the text, (token, log probability).
        advance_s: seconds after its start at which the next window begins.
        words: if they are requested.
    """

    start: float
    seconds: float
    segments: list[Segment]
    temperature: float = 0.0
    avg_logprob: float = 0.0
    no_speech_prob: float = 0.0
    logprobs: list[tuple[int, float]] = field(default_factory=list)
    advance_s: float = 0.0
    words: list[Word] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)

    @property
    def compression_ratio(self) -> float:
        """Ratio of the text's length to its zlib-compressed length: over 2.4 if repetitive."""
        data = self.text.encode()
        return len(data) / len(zlib.compress(data)) if data else 0.0


def split_segments(
    tokens: Sequence[int], first_time: int, window_seconds: float
) -> tuple[list[tuple[float, float, list[int]]], float]:
    """(start, end, tokens) of each segment, in seconds of the window, and the start of the next
    window, as in OpenAI's Whisper.

    A segment lies between two timestamps. A last segment without an end is left out, and the next
    window begins with it, because its speech continues beyond this window. If no segment has an
    end, the text ends with the window; text without timestamps is one segment.
    """
    segments: list[tuple[float, float, list[int]]] = []
    start, words = 0.0, list[int]()
    for token in tokens:
        if token < first_time:
            words.append(token)
            continue
        time = min((token - first_time) * TIME_STEP, window_seconds)
        if words:
            segments.append((start, time, words))
        start, words = time, []
    ends_in_pair = len(tokens) > 1 and min(tokens[-2:]) >= first_time
    if segments and (words or ends_in_pair) and start >= MIN_ADVANCE_S:
        return segments, start
    if words:
        segments.append((start, window_seconds, words))
    return segments, window_seconds


def transcript(windows: Iterable[WindowText]) -> str:
    return " ".join(text for window in windows if (text := window.text.strip()))


def srt(windows: Iterable[WindowText]) -> str:
    """SubRip."""
    lines = []
    segments = (segment for window in windows for segment in window.segments)
    for number, segment in enumerate(segments, 1):
        times = f"{_clock(segment.start, ',')} --> {_clock(segment.end, ',')}"
        lines.append(f"{number}\n{times}\n{_line(segment)}\n")
    return "\n".join(lines)


def vtt(windows: Iterable[WindowText]) -> str:
    """WebVTT."""
    lines = ["WEBVTT\n"]
    for segment in (segment for window in windows for segment in window.segments):
        times = f"{_clock(segment.start, '.')} --> {_clock(segment.end, '.')}"
        lines.append(f"{times}\n{_line(segment)}\n")
    return "\n".join(lines)


def _line(segment: Segment) -> str:
    """A cue's text, without arrows, which would end the cue."""
    return segment.text.strip().replace("-->", "->")


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{milliseconds // 1000:02}{point}{milliseconds % 1000:03}"


def verbose_segments(windows: Iterable[WindowText]) -> list[dict[str, Any]]:
    """OpenAI's segment objects."""
    return [
        {
            "id": number,
            "seek": round(window.start * 100),
            "start": round(segment.start, 2),
            "end": round(segment.end, 2),
            "text": segment.text,
            "tokens": segment.tokens,
            "temperature": window.temperature,
            "avg_logprob": window.avg_logprob,
            "compression_ratio": window.compression_ratio,
            "no_speech_prob": window.no_speech_prob,
        }
        for number, (window, segment) in enumerate(
            (window, segment) for window in windows for segment in window.segments
        )
    ]
