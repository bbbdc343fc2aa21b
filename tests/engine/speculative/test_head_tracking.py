"""A head that is a layer follows some sequences and not others, and catches up when it's asked."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from benchmarks.speculation import without_drafts
from engine import SamplingParams
from engine.models.decoder import NativeDecoder
from engine.scheduler import Sequence, StepPlan, StepResult
from engine.speculative.drafter import Drafter
from engine.speculative.loss_bound import LossBound
from engine.worker.compiled_step import CompiledStepRunner
from engine.worker.draft_head_cache import DraftHeadCache
from tests.engine.speculative.eagle_folders import eagle3_parts, eagle_parts
from tests.engine.speculative.head_folders import write
from tests.engine.speculative.test_eagle import BIASED, drafting, watched
from tests.engine.speculative.test_equality import make, texts

pytestmark = pytest.mark.usefixtures("free_drafts")

Folder = Callable[[str], Path]
PARTS = {"eagle": eagle_parts, "eagle3": eagle3_parts}


def follow_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tenant can bear it."""
    monkeypatch.setattr(LossBound, "can_read", lambda *_: False)


def long(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


@pytest.mark.parametrize("method", PARTS)
def test_drafts_after_a_late_catch_up_are_those_of_one_that_read_each_step(
    method: str, model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both before it has put off as much as it may, and behind that."""
    folder, (config, tensors) = model_folder("llama"), PARTS[method]()
    llm = drafting(folder, write(tmp_path, config, tensors), method, block_size=4,
                   max_model_len=512)  # fmt: skip
    watch = watched(llm, folder, tensors)
    propose, steps = Drafter.propose, [0]

    def late(self: Drafter, decoding: list[Sequence], *rest: Any) -> dict[int, list[int]]:
        steps[0] += 1
        return propose(self, decoding, *rest) if steps[0] % 150 > 140 else {}

    monkeypatch.setattr(Drafter, "propose", late)
    biased = msgspec.structs.replace(BIASED, max_tokens=320)
    llm.generate([[5, 6, 7], list(range(4, 25))], biased, use_tqdm=False)
    assert len(watch.depths) > 20
    assert not watch.mismatched_lengths
    assert steps[0] > 280


def _coin(seed: int, heads: float) -> Callable[..., bool]:
    rng = random.Random(seed)
    return lambda *_: rng.random() < heads


@pytest.mark.parametrize("method", PARTS)
@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_whoever_is_left_drafts_of_the_others_are_the_equations(
    method: str, seed: int, model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By chance some aren't followed at all, some no further: beside those, from blocks that both
    kinds left, in pieces, preempted, with drafts that held and drafts that didn't.
    """
    folder, (config, tensors) = model_folder("llama"), PARTS[method]()
    few = {"num_gpu_blocks_override": 40, "max_model_len": 96, "block_size": 4}
    settings = {**few, "max_num_batched_tokens": 24, "max_num_seqs": 6}
    llm = drafting(folder, write(tmp_path, config, tensors), method, **settings)
    watch = watched(llm, folder, tensors)
    monkeypatch.setattr(LossBound, "can_read", _coin(seed, 0.6))
    monkeypatch.setattr(LossBound, "can_draft", _coin(seed, 0.97))
    common = list(range(4, 60))
    asked = [[5, 6, 7], common[:17], common[:48], [*common[:32], 9], [*common, 9, 9, 8], [8] * 9]
    expected = [make(folder, **few).generate(asked, BIASED, use_tqdm=False)] * 4
    outputs = [llm.generate(asked, BIASED, use_tqdm=False) for _ in range(4)]
    assert [texts(output) for output in outputs] == [texts(output) for output in expected]
    assert len(watch.depths) > 20
    assert not watch.mismatched_lengths
    assert llm.core.snapshot().prefix_cache_hits_total > 50
    llm.core.check_integrity()


def test_who_begins_behind_blocks_that_were_not_followed_gets_no_drafts(
    model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, (config, tensors) = model_folder("llama"), eagle_parts()
    llm = drafting(folder, write(tmp_path, config, tensors), block_size=4)
    watch = watched(llm, folder, tensors)
    with monkeypatch.context() as patch:
        follow_none(patch)
        llm.generate([list(range(4, 40))], BIASED, use_tqdm=False)
    assert not watch.depths
    llm.generate([[*range(4, 40), 9]], BIASED, use_tqdm=False)
    assert not any(watch.depths)
    assert llm.core.snapshot().prefix_cache_hits_total >= 36
    llm.reset_prefix_cache()
    llm.generate([[*range(4, 40), 9]], BIASED, use_tqdm=False)
    assert any(watch.depths)
    assert not watch.mismatched_lengths


def _record_compiled(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each step in which all decode was one call."""
    ran_compiled: list[bool] = []
    full = CompiledStepRunner.run

    def spy(self: CompiledStepRunner, plan: StepPlan) -> StepResult | None:
        result = full(self, plan)
        if plan.num_decodes == len(plan.seq_ids):
            ran_compiled.append(result is not None)
        return result

    monkeypatch.setattr(CompiledStepRunner, "run", spy)
    return ran_compiled


@pytest.mark.parametrize("method", PARTS)
def test_steps_in_which_nobody_is_followed_are_those_of_an_engine_without_drafts(
    method: str, model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No states are kept, prompts' neither, and steps are one call, with taps too."""
    folder = model_folder("llama")
    llm = drafting(folder, write(tmp_path, *PARTS[method]()), method)
    follow_none(monkeypatch)
    ran_compiled = _record_compiled(monkeypatch)

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("kept")

    for name in ("save", "save_rows", "process_pending"):
        monkeypatch.setattr(DraftHeadCache, name, fail)
    outputs = llm.generate([[5, 6, 7], [8, 9]], BIASED, use_tqdm=False)
    assert texts(outputs) == texts(make(folder).generate([[5, 6, 7], [8, 9]], BIASED,
                                                         use_tqdm=False))  # fmt: skip
    assert len(ran_compiled) > 20
    assert all(ran_compiled)
    assert llm.core.stats.spec_decode_num_drafts_total == 0


@pytest.mark.parametrize(("method", "isolated"), [("eagle", 1 + 27), ("eagle3", 2)])
def test_the_last_layer_computes_no_tokens_of_a_prompt_that_is_not_followed(
    method: str,
    isolated: int,
    model_folder: Folder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But its last one. What `eagle3` reads comes from before that layer. Nor is anything noted of
    its other steps.
    """
    folder = model_folder("llama")
    prompts = [list(range(4, 31)), list(range(31, 58))]
    answers = iter([False, True])
    monkeypatch.setattr(LossBound, "can_read", lambda *_: next(answers))
    computed: list[int] = []
    forward = NativeDecoder.forward

    def spy(self: NativeDecoder, tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        hidden = forward(self, tokens, *rest)
        if len(tokens) == 2 * 27:
            computed.append(len(hidden))
        return hidden

    monkeypatch.setattr(NativeDecoder, "forward", spy)
    llm = drafting(folder, write(tmp_path, *PARTS[method]()), method)
    noted: list[tuple[set[int], int, int]] = []
    follow = DraftHeadCache._follow

    def record_call(
        self: DraftHeadCache, plan: StepPlan, owner: Any, positions: Any, hidden: torch.Tensor
    ) -> None:
        noted.append((set(owner.tolist()), len(owner), len(hidden)))
        follow(self, plan, owner, positions, hidden)

    monkeypatch.setattr(DraftHeadCache, "_follow", record_call)
    outputs = llm.generate(prompts, BIASED, use_tqdm=False)
    assert computed == [isolated]
    assert len(noted) > 2
    assert all(rows == noted[0][0] and tokens == states for rows, tokens, states in noted)
    assert len(noted[0][0]) == 1
    assert texts(outputs) == texts(make(folder).generate(prompts, BIASED, use_tqdm=False))
    assert llm.core.stats.spec_decode_num_drafts_total > 0


@pytest.mark.parametrize("method", PARTS)
def test_steps_in_which_everybody_is_followed_are_one_call_too(
    method: str, model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = drafting(model_folder("llama"), write(tmp_path, *PARTS[method]()), method)
    ran_compiled = _record_compiled(monkeypatch)
    llm.generate([[5, 6, 7], [8, 9]], long(24), use_tqdm=False)
    assert llm.core.stats.spec_decode_num_drafts_total > 10
    assert len(ran_compiled) > 10
    assert all(ran_compiled)


def test_requests_that_can_have_no_drafts_are_not_followed(
    model_folder: Folder, tmp_path: Path
) -> None:
    llm = drafting(model_folder("llama"), write(tmp_path, *eagle_parts()))
    seen: list[StepPlan] = []
    execute = llm.core.executor.execute

    def spy(plan: StepPlan) -> StepResult:
        seen.append(plan)
        return execute(plan)

    llm.core.executor.execute = spy
    llm.generate([[5, 6, 7]], long(1), use_tqdm=False)
    assert [step_record.untracked for step_record in seen if step_record.seq_ids] == [
        seen[0].seq_ids
    ]
    seen.clear()
    for _ in range(3):
        llm.generate([[5, 6, 7]], long(9), use_tqdm=False)
    assert not any(step_record.untracked for step_record in seen)
    assert len(llm.core.drafter._tracking._tenants) <= 1  # those that ended are forgotten


def test_steps_whose_drafts_are_set_aside_change_no_tenants_loss(
    model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is recovered in them would be spent in the steps that have drafts."""
    llm = drafting(model_folder("llama"), write(tmp_path, *eagle_parts()))
    prompts = [[5, 6, 7], list(range(4, 25))]
    llm.generate(prompts, long(4), use_tqdm=False)
    charged, followed = [], []
    charge, follow = LossBound.charge, LossBound.can_read
    monkeypatch.setattr(LossBound, "charge", lambda *args: (charged.append(args), charge(*args))[1])
    monkeypatch.setattr(
        LossBound, "can_read", lambda *args: (followed.append(args), follow(*args))[1]
    )
    with without_drafts(llm):
        llm.generate(prompts, long(4), use_tqdm=False)
    assert not charged
    assert not followed
    llm.generate(prompts, long(4), use_tqdm=False)
    assert charged
    assert followed
