"""The engine's sampler on the Triton kernels: as the plain reference has it, and never waiting."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.contract.sampling_params import SamplingParams
from engine.sampling import RequestSamplingState, Sampler
from engine.sampling.logprobs import prompt_logprobs
from engine.sampling.token_bitmask import TokenBitmask, pack_bits, unpack_bits
from kernels.triton import TritonKernels
from kernels.triton.launch import Target, watch
from tests.engine.sampling import reference
from tests.engine.sampling.test_sampler import EOS, cases, state

OPS = TritonKernels("cpu", "a test")


@pytest.mark.parametrize("vocab", [7, 97])
@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_mixed_batches_equal_the_reference(vocab, data):
    rows = data.draw(st.lists(cases(vocab), min_size=1, max_size=4))
    logits = torch.from_numpy(np.stack([row for row, _ in rows]))
    result = Sampler(EOS, OPS).sample(logits.clone(), [case for _, case in rows])
    for k, (row, case) in enumerate(rows):
        args = case.params, case.prompt_token_ids, case.output_token_ids
        if not np.isfinite(reference.constrained(row, *args, EOS).max()):
            assert k in result.errors
            continue
        want, margin = reference.choose(row, *args, case.seed, EOS)
        assert k not in result.errors
        if margin > 1e-5:
            assert int(result.token_ids[k]) == want


def test_penalties_follow_the_outputs_from_step_to_step():
    """Sequences come, go and come back, one starts over; what the device holds is always right."""
    on_device, baseline_sampler = Sampler(EOS, OPS), Sampler(EOS)
    rng = np.random.default_rng(7)
    params = SamplingParams(
        temperature=0, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.6
    )
    pool = [state(params, rng.integers(0, 40, 5), rng.integers(0, 40, 3)) for _ in range(4)]
    pool.append(state(temperature=0))
    for step, present in enumerate(([0, 1], [0, 1], [0, 4, 2, 1], [3, 2], [1, 3], [1, 3], [3, 1])):
        if step == 5:
            del pool[1].output_token_ids[2:]  # recomputed from an earlier point
        states = [pool[index] for index in present]
        logits = torch.from_numpy(rng.normal(size=(len(states), 40)).astype(np.float32))
        got = on_device.sample(logits.clone(), states)
        assert (
            got.token_ids.tolist()
            == baseline_sampler.sample(logits.clone(), states).token_ids.tolist()
        )
        for one, token in zip(states, got.token_ids.tolist(), strict=True):
            one.output_token_ids.append(token)


def test_penalized_outputs_outgrow_what_was_set_aside():
    on_device, baseline_sampler = Sampler((), OPS), Sampler()
    one = state(SamplingParams(temperature=0, presence_penalty=2.0), output=range(3))
    for length in (3, 250, 600):
        one.output_token_ids[:] = range(length)
        logits = torch.linspace(5.0, 0.0, 700)[None]
        got = on_device.sample(logits.clone(), [one]).token_ids
        assert got.tolist() == baseline_sampler.sample(logits.clone(), [one]).token_ids.tolist()


def test_log_probabilities_are_those_of_torch():
    logits = torch.randn(4, 90)
    states = [state(temperature=0, logprobs=k) for k in (0, 3)]
    states += [
        state(temperature=0),
        state(temperature=0, logprobs=2, presence_penalty=1.0, output=[3]),
    ]
    got, expected = (Sampler((), ops).sample(logits.clone(), states) for ops in (OPS, None))
    for one, other in zip(got.logprobs, expected.logprobs, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.token_ids == other.token_ids
            assert one.ranks == other.ranks
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_log_probabilities_of_a_prompt_are_those_of_torch():
    logits, following = torch.randn(5, 70).bfloat16(), torch.randint(0, 70, (5,))
    got, expected = (prompt_logprobs(logits, following, 3, ops) for ops in (OPS, None))
    for one, other in zip(got, expected, strict=True):
        assert (one.token_ids, one.ranks) == (other.token_ids, other.ranks)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize("forced", [[], [1]])
def test_grammar_masks(forced):
    rng = np.random.default_rng(1)
    logits = torch.randn(5, 77)
    logits[3] = float("-inf")  # everything forbidden by something else
    flags = rng.random((3, 96)) < 0.2
    bits = np.packbits(flags, axis=1, bitorder="little").view(np.int32)
    mask = TokenBitmask([4, 3, 0], bits, forced)
    baseline_copy = logits.clone()
    mask.apply(baseline_copy)
    mask.apply(logits, OPS.edits)
    assert torch.equal(logits, baseline_copy)


def test_packed_bits_are_unpacked_again():
    bits = pack_bits([[0, 31, 32, 76], [], [5, -1, 77, 1 << 40]], 77)
    allowed = unpack_bits(bits, 77, torch.device("cpu"))
    assert [row.nonzero().squeeze(-1).tolist() for row in allowed] == [[0, 31, 32, 76], [], [5]]


def test_choosing_never_waits_for_the_device():
    """Meta tensors have no data: whatever looked at a number there would raise."""
    fields = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.02}
    states: list[RequestSamplingState] = [
        state(temperature=0),
        state(**fields, repetition_penalty=1.2, frequency_penalty=0.3, output=[1, 2, 2]),
        state(temperature=1.0, logit_bias={3: 1.0}, allowed_token_ids=[1, 2, 3, 4]),
        state(**fields, min_tokens=5, bad_words_token_ids=[[5], [6, 7]], output=[6]),
        state(temperature=0, logprobs=4),
    ]
    mask = TokenBitmask([1, 4], np.full((2, 4), -1, dtype=np.int32), [0])
    launched = []
    ops = TritonKernels("meta", "a test")
    with watch(lambda kernel, *_: launched.append(kernel.__name__), Target(90, 132)):
        sampler = Sampler(EOS, ops)
        for _ in range(2):
            logits = torch.empty(5, 128, device="meta")
            choice = sampler.sample_async(logits, states, mask)
            assert choice.token_ids.device.type == "meta"
    kinds = {
        "edit_kernel", "bitmask_kernel", "record_kernel", "penalize_kernel", "scan_kernel",
        "select_kernel", "gather_kernel", "choose_kernel", "sort_kernel", "search_kernel",
        "logprobs_kernel",
    }  # fmt: skip
    assert set(launched) == kinds
