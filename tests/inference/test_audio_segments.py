"""Segments, subtitles and clocks of transcripts."""

from __future__ import annotations

from inference.api.audio.segments import (
    Segment,
    WindowText,
    split_segments,
    srt,
    transcript,
    verbose_segments,
    vtt,
)

FIRST = 100


def test_segments_stand_between_timestamps() -> None:
    tokens = [FIRST, 1, 2, FIRST + 50, FIRST + 50, 3, FIRST + 100]
    segments, advance = split_segments(tokens, FIRST, 30.0)
    assert segments == [(0.0, 1.0, [1, 2]), (1.0, 2.0, [3])]
    assert advance == 30.0  # one timestamp at the end: nobody speaks behind it


def test_a_segment_that_is_not_closed_ends_with_the_window() -> None:
    assert split_segments([FIRST + 10, 1], FIRST, 3.5) == ([(0.2, 3.5, [1])], 3.5)
    assert split_segments([1, 2], FIRST, 3.5) == ([(0.0, 3.5, [1, 2])], 3.5)
    assert split_segments([], FIRST, 3.5) == ([], 3.5)


def test_the_next_window_begins_where_the_last_closed_segment_ends() -> None:
    closed = [FIRST, 1, FIRST + 100, FIRST + 100]
    for tokens in (closed, [*closed, 2, 3]):
        assert split_segments(tokens, FIRST, 30.0) == ([(0.0, 2.0, [1])], 2.0)


def test_a_window_that_closes_next_to_nothing_is_taken_as_it_is() -> None:
    tokens = [FIRST, 1, FIRST + 1, FIRST + 1, 2]
    assert split_segments(tokens, FIRST, 30.0) == ([(0.0, 0.02, [1]), (0.02, 30.0, [2])], 30.0)


def test_no_time_is_after_the_window() -> None:
    assert split_segments([FIRST, 1, FIRST + 1400], FIRST, 11.0)[0] == [(0.0, 11.0, [1])]


def windows() -> list[WindowText]:
    """Two windows, an hour apart."""
    return [
        WindowText(0.0, 3.0, [Segment(0.0, 1.5, " Hello --> you", [1])]),
        WindowText(3600.0, 30.0, [Segment(3600.25, 3601.0, " again", [2, 3])], 0.2, -0.5, 0.1),
        WindowText(4000.0, 30.0, []),
    ]


def test_subtitles() -> None:
    assert transcript(windows()) == "Hello --> you again"
    assert srt(windows()) == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello -> you\n\n"
        "2\n01:00:00,250 --> 01:00:01,000\nagain\n"
    )
    assert vtt(windows()).startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello -> you\n")


def test_segments_are_numbered_through_the_file() -> None:
    first, second = verbose_segments(windows())
    assert (first["id"], second["id"], second["seek"]) == (0, 1, 360_000)
    assert (second["temperature"], second["avg_logprob"]) == (0.2, -0.5)


def test_text_that_repeats_itself_compresses_well() -> None:
    window_text = WindowText(0.0, 30.0, [Segment(0.0, 1.0, "again and " * 40, [1])])
    assert window_text.compression_ratio > 2.4
    assert WindowText(0.0, 30.0, []).compression_ratio == 0
