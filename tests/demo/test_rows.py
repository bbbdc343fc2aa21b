"""Packing: what is learned, and who may attend to whom."""

from __future__ import annotations

from itertools import islice
from random import Random

import pytest
import torch

from demo.generator.example import Example, assistant, exchange, user
from demo.generator.mixture import draw, stream
from demo.rows import Encoder, Row, collate, pack


@pytest.fixture(scope="module")
def encoder(tokenizer):
    return Encoder(tokenizer)


def learned_text(tokenizer, encoder, example):
    tokens, learned = encoder.encode(example)
    return tokenizer.decode([t for t, keep in zip(tokens, learned) if keep])


def test_only_the_answer_is_learned_with_its_end(tokenizer, encoder):
    example = exchange("x", "Who is there?", "It is me.")
    assert learned_text(tokenizer, encoder, example) == "It is me.<|im_end|>"


def test_every_answer_of_a_conversation_is_learned(tokenizer, encoder):
    example = Example("x", [user("a"), assistant("One."), user("b"), assistant("Two.")], ())
    assert learned_text(tokenizer, encoder, example) == "One.<|im_end|>Two.<|im_end|>"


def test_a_tools_result_is_not_learned(tokenizer, encoder):
    example = draw("tools", Random(0), "train")
    text = learned_text(tokenizer, encoder, example)
    assert "<tool_response>" not in text
    assert "<tools>" not in text


def test_rows_hold_whole_conversations(encoder, tokenizer):
    for row in islice(pack(stream(5), encoder, 256), 20):
        assert len(row.tokens) == len(row.learned) == len(row.document) <= 256
        assert row.tokens[-1] in tokenizer.encode("<|endoftext|>\n")


def test_rows_are_nearly_full(encoder):
    rows = list(islice(pack(stream(5), encoder, 256), 50))
    assert sum(len(row.tokens) for row in rows) > 0.95 * 256 * 50


def test_documents_do_not_see_each_other():
    row = Row([], [], [])
    row.append([5, 6], [False, True])
    row.append([7, 8, 9], [False, True, True])
    batch = collate([row], 6, pad=0)
    assert batch.labels.tolist() == [[6, -100, 8, 9, -100, -100]]
    assert batch.mask[0, 0, 3].tolist() == [False, False, True, True, False, False]
    assert bool(batch.mask[0, 0].any(dim=1).all()), "a row without a key is not a number"
    assert torch.equal(batch.positions[0], torch.arange(6))
