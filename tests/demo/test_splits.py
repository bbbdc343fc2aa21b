"""No held-out question is ever trained on."""

from __future__ import annotations

from itertools import islice
from random import Random

import pytest

from demo.evaluate import questions
from demo.generator.example import Example
from demo.generator.mixture import long_conversation, stream
from demo.generator.splits import held_out, normalize


@pytest.fixture(scope="module")
def trained() -> list[Example]:
    rng = Random(2)
    return [*islice(stream(7), 8000), *(long_conversation(rng, 15) for _ in range(50))]


def asked(example: Example) -> set[str]:
    """The questions as the split sees them."""
    return {normalize(key) for key in example.keys}


def test_no_training_conversation_holds_a_held_out_question(trained):
    assert not [example.keys for example in trained if any(map(held_out, example.keys))]


def test_every_test_question_is_held_out():
    assert all(held_out(example.keys[-1]) for example in questions(20))


def test_the_two_sides_share_no_question(trained):
    tested = {normalize(example.keys[-1]) for example in questions(50)}
    assert not tested & set().union(*map(asked, trained))


def test_a_held_out_pair_of_numbers_is_never_added_in_training(trained):
    asked = [e for e in questions(50) if e.topic == "arithmetic" and " so " in e.answer["content"]]
    results = {example.answer["content"].split(" so ")[1] for example in asked}
    texts = [m["content"] for example in trained for m in example.messages]
    parts = {text.split(" so ")[1] for text in texts if " so " in text}
    assert len(results) > 20
    assert not results & parts


def test_case_and_punctuation_make_no_other_question():
    assert normalize("What is 3+4?") == normalize("what is 3 + 4")
    assert normalize("3 - 4") != normalize("3 + 4")


def test_about_the_promised_share_is_held_out():
    share = sum(held_out(f"question {number}") for number in range(5000)) / 5000
    assert share == pytest.approx(0.08, abs=0.015)
