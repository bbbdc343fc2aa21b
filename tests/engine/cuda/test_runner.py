"""Steps on a device that is never waited for, but for the tokens of the step before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, AdapterLogitsProcessor, SamplingParams
from engine.worker.gpu.graphs import DeviceForward
from engine.worker.sampling_io import collect_outputs
from kernels.attention_args import AttentionArgs
from tests.engine.cuda.fake_device import FakeDevice, OnDevice, Waited, on_device
from tests.engine.models import Oracle
from tests.engine.speculative.free import make_drafts_free

Folder = Callable[[str], Path]
PROMPTS = [[5] * 20, [7, 8, 9], list(range(10, 50)), [60, 61]]
GREEDY = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return FakeDevice(monkeypatch)


def token_ids(llm: LLM, params: Any = GREEDY) -> list[list[list[int]]]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    llm.core.check_integrity()
    return [[one.token_ids for one in output.outputs] for output in outputs]


def test_the_fake_device_notices_who_waits() -> None:
    tensor = on_device(torch.arange(4))
    for synchronize in (
        lambda: tensor.tolist(),
        lambda: (tensor + 1).max().item(),
        lambda: tensor.cpu(),
        lambda: bool(tensor.sum() > 3),
        lambda: tensor[tensor > 1],
        lambda: (tensor < 0).nonzero(),
        lambda: int(tensor[0]),
    ):
        with pytest.raises(Waited):
            synchronize()
    assert isinstance(tensor[1:] * 2, OnDevice)


@pytest.mark.parametrize("budget", [512, 16])
@pytest.mark.parametrize("split", [True, False])
def test_greedy_tokens_equal_those_of_transformers(
    split: bool, budget: int, device: FakeDevice, model_folder: Folder,
    oracle: Callable[[str], Oracle],
) -> None:  # fmt: skip
    """With a budget of 16, prompts come in chunks beside decodes, and sequences are preempted."""
    llm = device.engine(
        model_folder("llama"), split=split, max_num_batched_tokens=budget,
        num_gpu_blocks_override=8,
    )  # fmt: skip
    expected = [[token] for token in oracle("llama").greedy_all(PROMPTS, 7)]
    assert token_ids(llm) == expected


def test_a_step_is_launched_before_the_last_ones_tokens_are_known(
    device: FakeDevice, model_folder: Folder
) -> None:
    llm = device.engine(model_folder("llama"))
    llm.generate([PROMPTS[1]], GREEDY, use_tqdm=False)
    waits = [index for index, (kind, _) in enumerate(device.events) if kind == "wait"]
    assert len(waits) >= 7
    for offset in waits[:5]:
        step = device.events[offset][1]
        assert ("launch", step + 1) in device.events[:offset]


def test_all_inputs_of_a_step_go_in_one_copy(device: FakeDevice, model_folder: Folder) -> None:
    llm = device.engine(model_folder("qwen2-window"))
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert len(device.sent) == sum(kind == "launch" for kind, _ in device.events)


END = {"max_tokens": 7, "ignore_eos": True}
MIXED = [
    SamplingParams(temperature=0.9, top_p=0.8, seed=3, **END),
    SamplingParams(temperature=1.2, seed=4, n=2, **END),
    SamplingParams(temperature=0, logprobs=3, **END),
    SamplingParams(temperature=0.7, top_k=5, min_p=0.1, seed=9, **END),
]
#: What the next token may be depends on those before.
WAITING = [
    SamplingParams(temperature=0, repetition_penalty=1.5, **END),
    SamplingParams(temperature=0.8, presence_penalty=1.0, frequency_penalty=0.5, seed=1, **END),
    SamplingParams(temperature=0, min_tokens=3, max_tokens=7),
    SamplingParams(temperature=0, bad_words_token_ids=[[5, 6], [9]], **END),
]


def forbids(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[output] = float("-inf")
    return logits


STEP_BY_STEP = [
    SamplingParams(temperature=0, logits_processors=[forbids], **END),
    SamplingParams(temperature=0, use_beam_search=True, n=2, best_of=2, **END),
    SamplingParams(temperature=0, prompt_logprobs=2, **END),
    SamplingParams(temperature=0, **END),
]
CASES = {"mixed": MIXED, "waiting": WAITING, "step by step": STEP_BY_STEP}


@pytest.fixture(scope="module")
def expected(model_folder: Folder) -> dict[str, list[list[list[int]]]]:
    """What the runner of a CPU gives."""
    llm = LLM(
        str(model_folder("llama")), dtype="float32", num_gpu_blocks_override=64, max_model_len=128
    )
    return {name: token_ids(llm, params) for name, params in CASES.items()}


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_the_plain_runner(
    case: str, inline: bool, expected: dict, device: FakeDevice, model_folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Where the host has to know the tokens before, it waits; nowhere else."""
    monkeypatch.setattr(OnDevice, "strict", case == "mixed")
    llm = device.engine(model_folder("llama"), inline=inline, max_num_batched_tokens=32)
    assert token_ids(llm, CASES[case]) == expected[case]


class NoRepeats(AdapterLogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        return forbids


def test_the_engines_logits_processors_see_all_tokens_before(
    device: FakeDevice, model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OnDevice, "strict", False)
    params = [SamplingParams(temperature=0, logits_processors=[forbids], **END)] * len(PROMPTS)
    expected_token_ids = token_ids(device.engine(model_folder("llama")), params)
    llm = device.engine(model_folder("llama"), logits_processors=[NoRepeats])
    assert (
        token_ids(llm, [SamplingParams(temperature=0, **END)] * len(PROMPTS)) == expected_token_ids
    )


def test_log_probabilities_come_with_the_tokens(device: FakeDevice, model_folder: Folder) -> None:
    params = SamplingParams(temperature=0, logprobs=3, **END)
    outputs = device.engine(model_folder("llama")).generate(PROMPTS, params, use_tqdm=False)
    for output in outputs:
        actual_output = output.outputs[0]
        assert actual_output.logprobs is not None
        for token_id, entry in zip(actual_output.token_ids, actual_output.logprobs, strict=True):
            assert entry[token_id].rank == 1
            assert len(entry) == 3


def test_a_step_that_fails_on_the_device_is_taken_back(
    device: FakeDevice,
    model_folder: Folder,
    oracle: Callable[[str], Oracle],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its tokens never come; the step that was launched behind it is taken back with it."""
    llm = device.engine(model_folder("llama"))
    calls = []

    def failing(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("an illegal address was met")
        collect_outputs(*args)

    monkeypatch.setattr("engine.worker.gpu.model_runner.collect_outputs", failing)
    assert token_ids(llm) == [[token] for token in oracle("llama").greedy_all(PROMPTS, 7)]


def test_logits_that_are_not_finite_fail_their_sequence_alone(
    device: FakeDevice, model_folder: Folder, oracle: Callable[[str], Oracle]
) -> None:
    from engine.contract.errors import EngineFault

    llm = device.engine(model_folder("llama"))
    model = llm.core.executor.worker.loaded.model
    logits = model.logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        spoiled = logits(hidden)
        spoiled[0] = float("nan")
        return spoiled

    model.logits = broken
    with pytest.raises(EngineFault, match="No token can be chosen"):
        llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False)
    model.logits = logits
    assert token_ids(llm) == [[token] for token in oracle("llama").greedy_all(PROMPTS, 7)]


def test_drafts_are_checked_step_by_step(
    device: FakeDevice, model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several tokens of a sequence in a step, some of which hold and some of which don't."""
    monkeypatch.setattr(OnDevice, "strict", False)
    make_drafts_free(monkeypatch)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    folder, apart = model_folder("llama"), {"async_scheduling": False}
    baseline_token_ids = token_ids(device.engine(folder, **apart), params)
    counts: list[int] = []
    forward = DeviceForward.__call__

    def noted(self: DeviceForward, ids: torch.Tensor, context: Any) -> torch.Tensor:
        counts.extend(context.query_start_loc.diff().tolist())
        return forward(self, ids, context)

    monkeypatch.setattr(DeviceForward, "__call__", noted)
    drafting = device.engine(
        folder, speculative_config={"method": "ngram", "num_speculative_tokens": 3}, **apart
    )
    assert token_ids(drafting, params) == baseline_token_ids
    assert 4 in counts


def test_decodes_beside_prompts_are_attended_to_by_themselves(
    device: FakeDevice, model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[int]] = []
    import kernels

    ops = kernels.get("cpu", use_compiled=False)
    attention = ops.paged_attention

    def noted(args: AttentionArgs) -> torch.Tensor:
        calls.append(args.query_start_loc.as_subclass(torch.Tensor).diff().tolist())
        return attention(args)

    monkeypatch.setitem(vars(ops), "paged_attention", noted)
    llm = device.engine(model_folder("llama"), max_num_batched_tokens=16)
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert any(max(counts) > 1 for counts in calls)
    for counts in calls:
        assert set(counts) == {1} or 1 not in counts
    calls.clear()
    llm = device.engine(model_folder("llama"), max_num_batched_tokens=16, split=False)
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert any(len(counts) > 1 and 1 in counts and max(counts) > 1 for counts in calls)
