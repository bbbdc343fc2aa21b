"""From tokens to words."""

from __future__ import annotations

import pytest

from inference.api.audio.words import split_words


def split(texts: list[str], *, spaced: bool = True) -> list[tuple[str, int]]:
    """Words of tokens that are these texts."""
    return split_words(range(len(texts)), lambda token: texts[token].encode(), spaced=spaced)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([" And", " so", ","], [(" And", 1), (" so,", 2)]),
        ([" fel", "low", " Americ", "ans", "."], [(" fellow", 2), (" Americans.", 3)]),
        ([' "', "No", "!", '"', " he", " said"], [(' "No!"', 4), (" he", 1), (" said", 1)]),
        ([" 3", ".", "5", " (", " or", " so", ")"], [(" 3.5", 3), (" ( or", 2), (" so)", 2)]),
        ([" Quoi", " ?"], [(" Quoi ?", 2)]),
        ([" ("], [(" (", 1)]),
        ([], []),
    ],
)
def test_words_begin_with_a_space_and_have_their_marks(
    tokens: list[str], words: list[tuple[str, int]]
) -> None:
    assert split(tokens) == words


def test_characters_are_words_where_no_spaces_are_written() -> None:
    assert split(["今", "天", "。", "好"], spaced=False) == [("今", 1), ("天。", 2), ("好", 1)]


def test_a_character_of_several_tokens_is_never_cut() -> None:
    data = " né".encode()
    parts = [data[:3], data[3:]]
    assert split_words([0, 1], lambda token: parts[token], spaced=True) == [(" né", 2)]
    assert split_words([0], lambda token: parts[token], spaced=True) == [(" n\ufffd", 1)]
