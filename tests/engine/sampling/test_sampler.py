"""The sampler against a plain float64 reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kernels
from engine.contract.sampling_params import SamplingParams
from engine.sampling import RequestSamplingState, Sampler
from tests.engine.sampling import reference

EOS = (0, 3)
MANY = settings(
    max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


def state(params=None, prompt=(), output=(), seed=0, **fields):
    return RequestSamplingState(
        params or SamplingParams(**fields), list(prompt), list(output), seed
    )


def sample(logits, *states, eos=()):
    output = Sampler(eos).sample(torch.as_tensor(logits, dtype=torch.float32).clone(), states)
    assert not output.errors, output.errors
    return output.token_ids.tolist()


@st.composite
def cases(draw, vocab):
    """One sequence's settings, logits and history."""
    ids = st.integers(0, vocab - 1)
    few = st.lists(ids, max_size=8)
    maybe = draw(st.sets(st.integers(0, 11)))

    def pick(k, strategy, default):
        return draw(strategy) if k in maybe else default

    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.01, 0.7, 1.0, 1.0, 2.0, 100.0])),
        top_k=pick(0, st.integers(1, 2 * vocab), -1),
        top_p=pick(1, st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]), 1.0),
        min_p=pick(2, st.sampled_from([0.0, 0.01, 0.3, 1.0]), 0.0),
        repetition_penalty=pick(3, st.sampled_from([0.5, 1.3, 2.0]), 1.0),
        frequency_penalty=pick(4, st.floats(-2, 2, width=16), 0.0),
        presence_penalty=pick(5, st.floats(-2, 2, width=16), 0.0),
        logit_bias=pick(6, st.dictionaries(ids, st.floats(-5, 5, width=16), max_size=5), None),
        allowed_token_ids=pick(7, st.lists(ids, min_size=5, max_size=20), None),
        bad_words_token_ids=pick(
            8, st.lists(st.lists(ids, min_size=1, max_size=3), max_size=3), None
        ),
        min_tokens=pick(9, st.integers(0, 8), 0),
        stop_token_ids=pick(10, few, None),
        ignore_eos=11 in maybe,
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = rng.normal(scale=draw(st.sampled_from([0.1, 1, 4])), size=vocab)
    if draw(st.booleans()):
        logits = np.round(logits * 2) / 2  # many ties
    case = state(params, draw(few), draw(few), draw(st.integers(0, 2**63 - 1)))
    return logits.astype(np.float32), case


@pytest.mark.parametrize("vocab", [7, 97, 300, 700])
@pytest.mark.parametrize("compiled", [True, False])
@given(data=st.data())
@MANY
def test_mixed_batches_equal_the_reference(vocab, compiled, data):
    ops = kernels.get("cpu", use_compiled=compiled)
    rows = data.draw(st.lists(cases(vocab), min_size=1, max_size=5))
    logits = torch.from_numpy(np.stack([row for row, _ in rows]))
    result = Sampler(EOS, ops).sample(logits.clone(), [case for _, case in rows])
    for k, (row, case) in enumerate(rows):
        limited = reference.constrained(
            row, case.params, case.prompt_token_ids, case.output_token_ids, EOS
        )
        if not np.isfinite(limited.max()):
            assert k in result.errors
            continue
        want, margin = reference.choose(
            row, case.params, case.prompt_token_ids, case.output_token_ids, case.seed, EOS
        )
        assert k not in result.errors
        if margin > 1e-6:
            assert int(result.token_ids[k]) == want


def is_sampled(logits, **fields):
    """Which tokens come out at all, in 600 draws."""
    rows = torch.tensor(logits, dtype=torch.float32).repeat(600, 1)
    params = SamplingParams(**fields)
    states = [state(params, seed=seed) for seed in range(600)]
    return sorted(set(sample(rows, *states)))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 1}, [1]),
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 3}, [0, 1, 3]),  # 0, 3 and 5 tie: the smaller ids win
        ({"top_k": 600}, [0, 1, 2, 3, 4, 5]),
        ({"top_p": 1e-12}, [1]),
        ({"top_p": 0.5}, [0, 1]),
        ({"top_p": 0.69}, [0, 1, 3]),
        ({"min_p": 1.0}, [1]),
        ({"min_p": 0.3}, [0, 1, 3, 5]),
        ({"min_p": 0.3, "top_k": 3}, [0, 1, 3]),
        ({"top_k": 4, "top_p": 0.8}, [0, 1, 3]),
        ({"min_p": 0.3, "top_p": 0.8}, [0, 1, 3]),
        ({"temperature": 1e-4}, [1]),
        ({"temperature": 100.0, "top_p": 0.5}, [0, 1, 3]),
        ({"allowed_token_ids": [2, 4], "top_k": 1}, [2]),
        ({"logit_bias": {4: 100.0}}, [4]),
    ],
)
def test_which_tokens_each_filter_keeps(fields, expected):
    # exp: 2, 4, 1, 2, 0.5, 2; in all 11.5
    assert is_sampled(np.log([2, 4, 1, 2, 0.5, 2]).tolist(), **fields) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 3.0, "top_k": 20},
        {"top_p": 0.8},
        {"min_p": 0.05, "temperature": 1.5},
        {"top_k": 30, "top_p": 0.9, "min_p": 0.01},
    ],
)
def test_frequencies_follow_the_distribution(fields):
    """Chi-square on 6,000 draws, each of its own seed."""
    logits = np.random.default_rng(1).normal(size=40).astype(np.float32)
    rows = torch.from_numpy(logits).repeat(6_000, 1)
    params = SamplingParams(**fields)
    tokens = sample(rows, *[state(params, seed=seed) for seed in range(6_000)])
    expected, _ = reference.distribution(logits.astype(np.float64), params)
    seen = np.bincount(tokens, minlength=40)
    assert not seen[expected == 0].any()
    seen, expected = seen[expected > 0], expected[expected > 0] * 6_000
    freedom = len(expected) - 1
    assert ((seen - expected) ** 2 / expected).sum() < freedom + 5 * np.sqrt(2 * freedom)


def test_successive_positions_are_independent():
    """One sequence's draws follow the distribution too, and neighbours aren't correlated."""
    one = state(seed=5)
    sampler = Sampler()
    for _ in range(2000):
        one.output_token_ids += sampler.sample(torch.zeros(1, 4), [one]).token_ids.tolist()
    pairs = np.array(one.output_token_ids[:-1]) * 4 + one.output_token_ids[1:]
    seen = np.bincount(pairs, minlength=16)
    assert ((seen - 125) ** 2 / 125).sum() < 15 + 5 * np.sqrt(30)


def mixed_states():
    """One sequence of every kind."""
    return [
        state(temperature=0.0, seed=1),
        state(seed=2),
        state(seed=3, temperature=0.6),
        state(seed=4, top_k=5),
        state(seed=5, top_p=0.9),
        state(seed=6, min_p=0.1, output=[3, 3, 9]),
        state(seed=7, top_k=300, top_p=0.99, temperature=2.0),
        state(seed=8, repetition_penalty=1.5, prompt=[1, 2], output=[4]),
        state(seed=9, allowed_token_ids=list(range(50)), logprobs=3),
        state(seed=10, frequency_penalty=1.0, output=[7] * 9, logit_bias={7: 3.0}),
        state(seed=11, bad_words_token_ids=[[5], [4, 6]], output=[4], top_k=40),
        state(temperature=0.0, presence_penalty=2.0, output=[8], min_tokens=4),
    ]


def test_a_sequence_gets_the_same_token_alone_and_in_any_batch():
    logits = torch.randn(12, 1000, generator=torch.Generator().manual_seed(3)) * 3
    full_values = Sampler(EOS).sample(logits.clone(), mixed_states()).token_ids.tolist()
    isolated_items = [
        Sampler(EOS).sample(logits[k : k + 1].clone(), [one]).token_ids.item()
        for k, one in enumerate(mixed_states())
    ]
    assert full_values == isolated_items
    turned = list(reversed(range(12)))
    states = mixed_states()
    again = Sampler(EOS).sample(logits[turned].clone(), [states[k] for k in turned])
    assert again.token_ids.tolist() == full_values[::-1]


def test_a_resumed_sequence_draws_as_if_it_had_never_stopped():
    generator = torch.Generator().manual_seed(0)
    steps = [torch.randn(1, 500, generator=generator) for _ in range(50)]
    sampler, one = Sampler(), state(seed=42, top_p=0.95, repetition_penalty=1.1, prompt=[1])
    for logits in steps:
        one.output_token_ids += sampler.sample(logits.clone(), [one]).token_ids.tolist()
    for stop in (0, 1, 31, 32, 49):
        other = state(
            seed=42,
            top_p=0.95,
            repetition_penalty=1.1,
            prompt=[1],
            output=one.output_token_ids[:stop],
        )
        sampler = Sampler()
        for logits in steps[stop:]:
            other.output_token_ids += sampler.sample(logits.clone(), [other]).token_ids.tolist()
        assert other.output_token_ids == one.output_token_ids


def test_sampler_isnt_called_for_every_appended_token():
    one = state(seed=1, frequency_penalty=2.0)
    sampler = Sampler()
    sampler.sample(torch.zeros(1, 4), [one])
    one.output_token_ids += [0, 0, 1, 1, 2]
    logits = torch.zeros(1, 4)
    sampler.sample(logits, [one])
    assert logits.tolist() == [[-4.0, -4.0, -2.0, 0.0]]
    one.output_token_ids[:] = [3]  # taken back
    logits = torch.zeros(1, 4)
    sampler.sample(logits, [one])
    assert logits.tolist() == [[0.0, 0.0, 0.0, -2.0]]


def test_seeds_differ_and_repeat():
    logits = torch.zeros(64, 5000)
    states = [state(seed=seed) for seed in range(64)]
    tokens = sample(logits, *states)
    assert len(set(tokens)) > 55
    assert tokens == sample(logits, *[state(seed=seed) for seed in range(64)])
    assert tokens != sample(logits, *[state(seed=seed + 2**62) for seed in range(64)])


def test_greedy_rows_of_a_mixed_batch_are_exactly_the_maximum():
    logits = torch.randn(6, 3000)
    logits[:, 7] = logits.amax(dim=-1)
    states = [state(temperature=0.0 if k % 2 else 1.0, seed=k) for k in range(6)]
    tokens = sample(logits, *states)
    assert tokens[1::2] == logits[1::2].argmax(dim=-1).tolist()
    assert sample(logits, *[state(temperature=9e-6)] * 6) == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types(dtype):
    logits = torch.randn(4, 300).to(dtype)
    states = [state(temperature=0.0), state(top_k=1), state(top_p=1e-6), state(logprobs=1)]
    output = Sampler().sample(logits.clone(), states)
    assert output.token_ids.tolist()[:3] == logits.float().argmax(dim=-1).tolist()[:3]


BAD_ROWS = {
    "nan": [0.0, float("nan"), 1.0, 2.0],
    "inf": [0.0, float("inf"), 1.0, 2.0],
    "nothing": [float("-inf")] * 4,
}


@pytest.mark.parametrize("bad", BAD_ROWS)
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {},
        {"temperature": 0.5},
        {"top_k": 2},
        {"top_p": 0.5},
        {"min_p": 0.1},
        {"logprobs": 2},
        {"repetition_penalty": 1.2},
    ],
)
def test_fault_10_a_broken_row_ends_alone(bad, fields):
    good = [0.0, 1.0, 2.0, 3.0]
    logits = torch.tensor([good, BAD_ROWS[bad], good])
    states = [state(seed=k, **fields) for k in range(3)]
    output = Sampler().sample(logits.clone(), states)
    assert list(output.errors) == [1]
    assert output.token_ids[1] == -1
    assert output.logprobs[1] is None
    neighbours = Sampler().sample(logits[[0, 2]].clone(), [states[0], states[2]])
    assert output.token_ids[[0, 2]].tolist() == neighbours.token_ids.tolist()
    isolated_sample = Sampler().sample(logits[1:2].clone(), [states[1]])
    assert list(isolated_sample.errors) == [0]


def test_fault_09_ids_beyond_the_vocabulary_touch_no_neighbour():
    logits = torch.zeros(2, 10)
    wild = state(
        temperature=0.0,
        logit_bias={10: 5.0, 9: 1.0},
        allowed_token_ids=[9, 10**6],
        bad_words_token_ids=[[99]],
        stop_token_ids=[10],
        min_tokens=3,
        prompt=[500],
        repetition_penalty=1.1,
    )
    assert sample(logits, wild, state(temperature=0.0), eos=[10])[0] == 9
    only = state(allowed_token_ids=[10**6])
    output = Sampler().sample(logits.clone(), [only, state(temperature=0.0)])
    assert list(output.errors) == [0]
    assert output.token_ids[1] == 0


def test_min_tokens_holds_every_end_back_until_reached():
    logits = torch.zeros(1, 6)
    logits[0, [3, 4]] = 9.0
    sampler = Sampler([3])
    one = state(temperature=0.0, min_tokens=2, stop_token_ids=[4])
    seen = []
    for _ in range(3):
        seen += sampler.sample(logits.clone(), [one]).token_ids.tolist()
        one.output_token_ids.append(seen[-1])
    assert seen == [0, 0, 3]
    free = state(temperature=0.0, min_tokens=2, ignore_eos=True)
    assert sampler.sample(logits.clone(), [free]).token_ids.tolist() == [3]


def test_processors_see_the_output_and_the_prompt():
    calls = []

    def two(output, logits):
        calls.append(list(output))
        logits[2] += 50
        return logits

    def three(prompt, output, logits):
        calls.append((prompt, list(output)))
        return logits * 1.0

    one = state(temperature=0.0, logits_processors=[two, three], prompt=[7], output=[8])
    assert sample(torch.zeros(2, 4), one, state(temperature=0.0)) == [2, 0]
    assert calls == [[8], ([7], [8])]


def test_a_processor_that_fails_ends_its_sequence_alone():
    def bad(output, logits):
        raise KeyError("x")

    states = [
        state(logits_processors=[bad], logprobs=1),
        state(temperature=0.0),
        state(logits_processors=[lambda output, logits: logits[:2]]),
        state(logits_processors=[lambda output, logits: logits * float("nan")]),
    ]
    output = Sampler().sample(torch.zeros(4, 4), states)
    assert sorted(output.errors) == [0, 2, 3]
    assert "KeyError" in output.errors[0]
    assert "shape" in output.errors[2]
    assert output.token_ids.tolist() == [-1, 0, -1, -1]
    assert output.logprobs[0] is None


def test_a_finished_neighbour_changes_nothing():
    sampler, logits = Sampler(), torch.randn(3, 50)
    states = [state(seed=k) for k in range(3)]
    first = sampler.sample(logits.clone(), states).token_ids.tolist()
    assert sampler.sample(logits[1:].clone(), states[1:]).token_ids.tolist() == first[1:]


def test_derived_tensors_are_kept_while_the_batch_stays():
    sampler = Sampler()
    states = [state(seed=k, top_p=0.9) for k in range(3)]
    sampler.sample(torch.zeros(3, 9), states)
    retained_batch = sampler._batch
    sampler.sample(torch.zeros(3, 9), list(states))
    assert sampler._batch is retained_batch
    sampler.sample(torch.zeros(3, 9), states[::-1])
    assert sampler._batch is not retained_batch


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError):
        Sampler().sample(torch.zeros(2, 3), [state()])
    empty = Sampler().sample(torch.zeros(0, 3), [])
    assert empty.token_ids.shape == (0,)
    assert empty.logprobs == []


def test_a_whole_temperature_is_a_number_too():
    output = Sampler(ops=kernels.get("cpu")).sample(
        torch.tensor([[0.0, 99.0, 0.0]]), [state(temperature=1)]
    )
    assert output.token_ids.tolist() == [1]
