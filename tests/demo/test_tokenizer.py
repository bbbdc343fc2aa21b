"""The shipped tokenizer writes any text, and digits one at a time."""

from __future__ import annotations

import pytest

TEXTS = (
    "Hello, world!", "  two spaces\n\nand lines\t", "Grüße aus Köln", "日本語のテキスト",
    "مرحبا بالعالم",
    "👩‍👩‍👧‍👦 🏴‍☠️", "a\u0301 b\u200bc", "\x00\x7f", "'s don't WE'LL", "x" * 300, "",
)  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_survives(tokenizer, text):
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(tokens, clean_up_tokenization_spaces=False) == text


def test_digits_are_tokens_of_their_own(tokenizer):
    tokens = tokenizer.tokenize("2048 + 17")
    assert [token for token in tokens if token.isdigit()] == list("204817")


@pytest.mark.parametrize("token", ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"])
def test_markup_is_special(tokenizer, token):
    (number,) = tokenizer.encode(token, add_special_tokens=False)
    assert number in tokenizer.all_special_ids
    assert tokenizer.decode([number], skip_special_tokens=True) == ""


@pytest.mark.parametrize("tag", ["<tool_call>", "</tool_call>", "<tool_response>", "<tools>"])
def test_tool_tags_are_single_tokens_that_a_client_still_sees(tokenizer, tag):
    tokens = tokenizer.encode(tag, add_special_tokens=False)
    assert len(tokens) == 1
    assert tokenizer.decode(tokens, skip_special_tokens=True) == tag


def test_nothing_is_added_around_a_text(tokenizer):
    assert tokenizer.encode("Hello") == tokenizer.encode("Hello", add_special_tokens=False)


def test_the_ends_are_the_models(tokenizer):
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|pad|>"
    assert tokenizer.bos_token is None
