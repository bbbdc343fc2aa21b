"""Tokens to text: the same, however they are grouped."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.contract.messages import TokenLogprobs
from engine.contract.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer
from inference.engine_client.mailbox import TokenChunk
from inference.generation.output import OutputDelta, OutputState
from tests.inference.tokenizer_folder import EOS

TEXT = "Grüße 🙂 and the STOP word; then END. 你好"


def run(
    tokenizer: Tokenizer,
    tokens: list[int],
    groups: list[int],
    *,
    finish: str = "stop",
    eos: bool = True,
    **sampling: object,
) -> tuple[str, list[OutputDelta], OutputState]:
    """Push tokens in groups of these sizes, the last with the end."""
    state = OutputState(0, 0, tokenizer, [5], SamplingParams(**sampling))  # type: ignore[arg-type]
    tokens = [*tokens, EOS] if eos else tokens
    increments, position = [], 0
    while position < len(tokens) and state.finish_reason is None:
        size = groups[len(increments) % len(groups)] if groups else 1
        part = tokens[position : position + max(1, size)]
        position += len(part)
        last = position >= len(tokens)
        scores = [TokenLogprobs([t], [-0.25], [1]) for t in part]
        chunk = TokenChunk(0, 0, part, scores, finish_reason=finish if last else None)
        if (increment := state.push(chunk)) is not None:
            increments.append(increment)
    return "".join(i.text for i in increments), increments, state


def by_byte(tokenizer: Tokenizer, text: str) -> list[int]:
    table = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [table[bytes([byte])] for byte in text.encode()]


def test_text_comes_whole_and_eos_stays_hidden(tokenizer: Tokenizer) -> None:
    text, increments, state = run(tokenizer, by_byte(tokenizer, TEXT), [1])
    assert text == TEXT
    assert "�" not in "".join(i.text for i in increments)
    assert (state.finish_reason, state.stop_reason) == ("stop", None)
    assert state.num_tokens == len(TEXT.encode()) + 1


def test_half_a_character_is_never_shown(tokenizer: Tokenizer) -> None:
    _, increments, _ = run(tokenizer, by_byte(tokenizer, "🙂🙃"), [1])
    assert [i.text for i in increments] == ["🙂", "🙃", ""]


def test_an_unfinished_character_at_the_end_becomes_one_replacement(tokenizer: Tokenizer) -> None:
    tokens = by_byte(tokenizer, "ab🙂")[:-1]
    text, _, _ = run(tokenizer, tokens, [1], finish="length", eos=False)
    assert text == "ab�"


@pytest.mark.parametrize("groups", [[1], [3], [1000], [2, 7, 1]])
def test_fault_11_a_stop_string_split_over_tokens_is_cut_exactly(
    tokenizer: Tokenizer, groups: list[int]
) -> None:
    tokens = by_byte(tokenizer, TEXT)
    text, increments, state = run(tokenizer, tokens, groups, stop=["STOP", "END"])
    assert text == "Grüße 🙂 and the "
    assert (state.finish_reason, state.stop_reason) == ("stop", "STOP")
    # Tokens after the stop string don't count, even when they came in the same piece.
    assert state.num_tokens == len("Grüße 🙂 and the STOP".encode())
    assert sum(len(i.token_ids) for i in increments) == state.num_tokens
    assert sum(len(i.entries) for i in increments) == state.num_tokens


def test_the_stop_string_is_kept_on_request(tokenizer: Tokenizer) -> None:
    text, _, _ = run(
        tokenizer, by_byte(tokenizer, TEXT), [4], stop=["STOP"], include_stop_str_in_output=True
    )
    assert text == "Grüße 🙂 and the STOP"


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    tokens = by_byte(tokenizer, "STOP and STOP")
    text, _, state = run(tokenizer, tokens, [5], stop=["STOP"], min_tokens=6, max_tokens=99)
    assert text == "STOP and "
    assert state.stop_reason == "STOP"


def test_text_that_only_began_like_a_stop_string_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    text, _, state = run(tokenizer, by_byte(tokenizer, "well, STO"), [1], stop=["STOP"])
    assert text == "well, STO"
    assert state.stop_reason is None


def test_a_stop_token_of_the_clients_is_named_and_shown(tokenizer: Tokenizer) -> None:
    state = OutputState(0, 0, tokenizer, [5], SamplingParams(stop_token_ids=[70]))
    chunk = TokenChunk(0, 0, [60, 70], finish_reason="stop", stop_reason=70)
    increment = state.push(chunk)
    assert increment is not None
    assert increment.text == tokenizer.decode([60, 70])
    assert (increment.finish_reason, increment.stop_reason) == ("stop", 70)


def test_log_probabilities_know_their_place_in_the_text(tokenizer: Tokenizer) -> None:
    _, increments, state = run(tokenizer, by_byte(tokenizer, "a🙂b"), [1], logprobs=0)
    offsets = [entry.offset for i in increments for entry in i.entries]
    assert offsets == [0, 1, 1, 1, 1, 2, 3]
    assert state.sum_logprobs == pytest.approx(-0.25 * 7)


@pytest.mark.parametrize("size", [1, 3, 4, 5])
@pytest.mark.parametrize(("ending", "visible"), [("OP!", "ab"), ("O!", "abSTO!")])
def test_fault_100_log_probabilities_wait_for_what_may_become_a_stop_string(
    tokenizer: Tokenizer, size: int, ending: str, visible: str
) -> None:
    tokens = by_byte(tokenizer, f"abST{ending}")
    text, increments, _ = run(tokenizer, tokens, [size], logprobs=0, stop=["STOP"])
    entries = [entry for i in increments for entry in i.entries]
    named = b"".join(tokenizer.token_bytes(entry.token_id) for entry in entries if entry.in_text)
    assert (text, named.decode()) == (visible, visible)
    assert all(len(i.entries) == len(i.token_ids) for i in increments)


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(alphabet=st.sampled_from("abST OPüß🙂你\n"), min_size=1, max_size=40),
    seed=st.integers(0, 2**32),
    with_stop=st.booleans(),
    logprobs=st.booleans(),
)
def test_grouping_changes_nothing(
    tokenizer: Tokenizer, text: str, seed: int, with_stop: bool, logprobs: bool
) -> None:
    sampling: dict[str, object] = {"stop": ["STOP", "ab"]} if with_stop else {}
    if logprobs:
        sampling["logprobs"] = 0
    tokens = by_byte(tokenizer, text)
    rng = random.Random(seed)
    groups = [rng.randint(1, 6) for _ in range(10)]
    one, _, state_one = run(tokenizer, tokens, [1], **sampling)
    some, _, state_some = run(tokenizer, tokens, groups, **sampling)
    assert one == some
    assert state_one.num_tokens == state_some.num_tokens
    assert state_one.stop_reason == state_some.stop_reason
    if not with_stop:
        assert one == text


@pytest.mark.parametrize(
    ("engine", "finish", "stop"),
    [
        ("length", "length", None),
        ("budget", "length", "budget"),
        ("repetition", "stop", "repetition_detected"),
    ],
)
def test_clients_are_told_reasons_that_they_know_and_why(
    tokenizer: Tokenizer, engine: str, finish: str, stop: str | None
) -> None:
    text, increments, state = run(
        tokenizer, by_byte(tokenizer, "ab"), [2], finish=engine, eos=False
    )
    assert text == "ab"
    assert (increments[-1].finish_reason, increments[-1].stop_reason) == (finish, stop)
    assert state.engine_reason == engine


@pytest.mark.parametrize(
    ("include", "hide", "tail"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_the_eos_that_ended_it_shows_when_the_stop_is_included_and_special_tokens_are_kept(
    tokenizer: Tokenizer, include: bool, hide: bool, tail: bool
) -> None:
    text, _, _ = run(
        tokenizer,
        by_byte(tokenizer, "ab"),
        [1],
        include_stop_str_in_output=include,
        skip_special_tokens=hide,
    )
    assert text == "ab" + (tokenizer.decode([EOS], False) if tail else "")
