"""Bad words are forbidden in every place they can stand."""

from __future__ import annotations

import pytest

from engine.text.stop_strings import bad_word_ids
from tests.engine.text.conftest import BYTE_KINDS


@pytest.mark.parametrize("kind", BYTE_KINDS)
@pytest.mark.parametrize("text", ["fox", "the fox", "a\nfox", "(fox"])
def test_a_word_is_found_wherever_the_tokenizer_keeps_it_whole(tokenizer_of, kind, text):
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    banned_ids = bad_word_ids(tokenizer, ["fox"])
    assert any(ids[k : k + len(word)] == word for word in banned_ids for k in range(len(ids))), (
        tokenizer.decode(ids),
        [[tokenizer.id_to_piece(i) for i in word] for word in banned_ids],
    )


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_each_spelling_is_the_word_and_comes_once(tokenizer_of, kind):
    tokenizer = tokenizer_of(kind)
    banned_ids = bad_word_ids(tokenizer, ["fox", " fox", "fox"])
    assert 1 <= len(banned_ids) <= 3
    assert len({tuple(word) for word in banned_ids}) == len(banned_ids)
    assert {tokenizer.decode(word).strip() for word in banned_ids} == {"fox"}


def test_control_tokens_in_a_bad_word_are_text(tokenizer_of):
    tokenizer = tokenizer_of("byte_level")
    for word in bad_word_ids(tokenizer, ["<|im_end|>"]):
        assert tokenizer.special_token_ids.isdisjoint(word)
