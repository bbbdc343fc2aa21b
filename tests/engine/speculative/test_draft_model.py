"""A draft model changes nothing but how many tokens a step gives."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM, SamplingParams
from engine.contract.errors import ConfigError, ModelLoadError
from engine.contract.messages import EngineRequest
from engine.devices.cpu import CpuDevice
from engine.scheduler import StepPlan, StepResult
from tests.engine.models import make_model, make_tokenizer
from tests.engine.speculative.test_equality import MIXED, make, prompts, run, texts
from tests.survey.recipes import RECIPES
from tests.survey.tiny import make_checkpoint

pytestmark = pytest.mark.usefixtures("free_drafts")

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def draft(model_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nearly the model itself: mostly right."""
    folder = tmp_path_factory.mktemp("draft")
    shutil.copytree(model_folder("llama"), folder, dirs_exist_ok=True)
    torch.manual_seed(1)
    weights = {
        name: tensor + 0.001 * torch.randn_like(tensor)
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def drafting(folder: Path, draft: Path, **settings: Any) -> LLM:
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4}
    return make(folder, speculative_config=config, **settings)


@pytest.mark.parametrize("kernels", [True, False])
def test_every_way_of_choosing_gives_the_same(
    kernels: bool, model_folder: Folder, draft: Path
) -> None:
    folder, asked = model_folder("llama"), prompts(random.Random(5))
    baseline = run(make(folder, cpu_kernels=kernels), asked)
    llm = drafting(folder, draft, cpu_kernels=kernels)
    for turn in range(1 + kernels):  # cold, then from both prefix caches
        drafted = run(llm, asked)
        assert texts(drafted) == texts(baseline), turn
        for was, now in zip(baseline, drafted, strict=True) if kernels else ():
            assert [completion.logprobs for completion in was.outputs] == [
                completion.logprobs for completion in now.outputs
            ]
    stats = llm.core.stats
    # How many are drawn follows what the steps of a busy machine take.
    assert stats.spec_decode_num_accepted_tokens_total > 40 * (1 + kernels)
    assert stats.spec_decode_num_accepted_tokens_total < stats.spec_decode_num_draft_tokens_total


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_a_rounded_model_and_a_rounded_draft_say_the_same(
    bits: str, model_folder: Folder, draft: Path
) -> None:
    folder, asked = model_folder("llama"), prompts(random.Random(bits))
    baseline = run(make(folder, quantization=bits), asked)
    config = {"model": str(draft), "num_speculative_tokens": 4, "quantization": bits}
    llm = make(folder, quantization=bits, speculative_config=config)
    drafted = run(llm, asked)
    assert texts(drafted) == texts(baseline)
    assert [[completion.logprobs for completion in out.outputs] for out in drafted] == [
        [completion.logprobs for completion in out.outputs] for out in baseline
    ]
    assert llm.core.stats.spec_decode_num_accepted_tokens_total > 20


def test_a_sampled_text_is_drafted_with_the_same_random_numbers(model_folder: Folder) -> None:
    """A draft that is the model itself draws what the model draws, penalties and all."""
    folder = model_folder("llama")
    params = [MIXED[name] for name in ("seeded", "filters", "penalties", "bias", "least")]
    llm = drafting(folder, folder)
    llm.generate([[5, 6, 7]] * len(params), params, use_tqdm=False)
    stats = llm.core.stats
    assert stats.spec_decode_num_draft_tokens_total > 40
    assert stats.spec_decode_num_accepted_tokens_total == stats.spec_decode_num_draft_tokens_total


@pytest.mark.parametrize("name", ["lfm2", pytest.param("granite4", marks=pytest.mark.slow)])
def test_a_draft_with_states_goes_back_to_before_its_drafts(name: str, tmp_path: Path) -> None:
    """A draft that is mostly right, so that some of what it drew is taken back; sequences are
    preempted too, and there are more of them than rows.
    """
    folder, draft = tmp_path / "model", tmp_path / "draft"
    make_checkpoint(RECIPES[name], folder)
    shutil.copytree(folder, draft)
    torch.manual_seed(1)
    weights = {
        key: tensor + 0.005 * torch.randn_like(tensor)
        for key, tensor in load_file(draft / "model.safetensors").items()
    }
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    asked = prompts(random.Random(5))
    few = {"num_gpu_blocks_override": 30, "max_model_len": 128}
    baseline = run(make(folder, **few), asked)
    for settings in (few, few | {"max_num_seqs": 3}):
        llm = drafting(folder, draft, **settings)
        for _ in range(2):
            assert texts(run(llm, asked)) == texts(baseline)
        stats = llm.core.stats
        num_accepted = stats.spec_decode_num_accepted_tokens_total
        assert 0 < num_accepted < stats.spec_decode_num_draft_tokens_total
        assert llm.core.drafter.model.is_healthy
        llm.core.check_integrity()


def test_a_draft_with_states_that_is_the_model_is_always_right(tmp_path: Path) -> None:
    make_checkpoint(RECIPES["lfm2"], tmp_path)
    llm = drafting(tmp_path, tmp_path)
    llm.generate([[5, 6, 7], [8] * 40], SamplingParams(temperature=0, max_tokens=30))
    stats = llm.core.stats
    assert stats.spec_decode_num_draft_tokens_total > 10
    assert stats.spec_decode_num_accepted_tokens_total == stats.spec_decode_num_draft_tokens_total


def test_a_draft_with_states_that_ends_at_once_returns_its_block(tmp_path: Path) -> None:
    """The first draft ends the text each time, so no more are drawn behind it."""
    make_checkpoint(RECIPES["lfm2"], tmp_path)
    llm = drafting(tmp_path, tmp_path)
    always_ends = SamplingParams(
        temperature=0, max_tokens=30, ignore_eos=True, logit_bias={2: 100.0}
    )
    llm.generate([[5, 6, 7], [8] * 40], always_ends)
    assert llm.core.stats.spec_decode_num_accepted_tokens_total > 10
    assert llm.core.drafter.model.is_healthy
    llm.core.check_integrity()


def test_preempted_sequences_are_caught_up_with(model_folder: Folder, draft: Path) -> None:
    folder, asked = model_folder("llama"), prompts(random.Random(3))
    baseline = run(make(folder), asked)
    few = {"num_gpu_blocks_override": 14, "max_model_len": 128}
    llm = drafting(folder, draft, **few)
    assert texts(run(llm, asked)) == texts(baseline)
    assert llm.core.scheduler.num_preemptions > 0
    assert llm.core.stats.spec_decode_num_accepted_tokens_total > 0


def test_a_pool_too_small_for_all_leaves_some_without_drafts(
    model_folder: Folder, draft: Path
) -> None:
    folder = model_folder("llama")
    llm = drafting(folder, draft, num_gpu_blocks_override=400, max_model_len=64, max_num_seqs=32)
    model = llm.core.drafter.model
    block_lists = [model.kv.pool.get_new_blocks(model.kv.pool.num_free_blocks - 8, model._quota)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    asked = [[5 + number] * 20 for number in range(12)]
    drafted = llm.generate(asked, params, use_tqdm=False)
    baseline_outputs = make(folder, max_model_len=64).generate(asked, params, use_tqdm=False)
    assert texts(drafted) == texts(baseline_outputs)
    assert 0 < llm.core.stats.spec_decode_num_drafts_total < 12 * 19
    for blocks in block_lists:
        model.kv.pool.free_blocks(blocks, model._quota)


def test_a_long_prompt_is_read_in_pieces_beside_others(model_folder: Folder, draft: Path) -> None:
    folder = model_folder("llama")
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    asked = [list(range(4, 204)), [9, 8, 7]]
    llm = drafting(folder, draft)
    object.__setattr__(llm.core.drafter.model._facts, "token_budget", 32)
    assert texts(llm.generate(asked, params, use_tqdm=False)) == texts(
        make(folder).generate(asked, params, use_tqdm=False)
    )
    assert llm.core.stats.spec_decode_num_accepted_tokens_total > 0
    llm.core.check_integrity()


def test_it_sleeps_with_the_model(model_folder: Folder, draft: Path) -> None:
    folder, asked = model_folder("llama"), [[5, 6, 7], [8, 9]]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    llm = drafting(folder, draft, enable_sleep_mode=True)
    initial_outputs = llm.generate(asked, params, use_tqdm=False)
    for level in (1, 2, 1):
        llm.sleep(level)
        assert not llm.core.executor.drafts.of_model._sleeper._loaded.model.__dict__.get(
            "kv_caches"
        )
        llm.wake_up()
        llm.core.reset_stats()
        assert texts(llm.generate(asked, params, use_tqdm=False)) == texts(initial_outputs)
        assert llm.core.stats.spec_decode_num_accepted_tokens_total > 10


def test_a_draft_that_fails_ends_drafts_alone(
    model_folder: Folder, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = model_folder("llama"), [[5, 6, 7], [8, 9]]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    llm = drafting(folder, draft)
    failed = []

    def fail(plan: StepPlan) -> StepResult:
        failed.append(plan.step)
        raise MemoryError("none left")

    monkeypatch.setattr(llm.core.drafter.model, "_run", fail)
    drafted = llm.generate(asked, params, use_tqdm=False)
    assert texts(drafted) == texts(make(folder).generate(asked, params, use_tqdm=False))
    assert len(failed) == 3
    assert llm.core.stats.spec_decode_num_drafts_total == 0
    llm.core.check_integrity()


def test_a_text_goes_on_behind_what_another_engine_said(model_folder: Folder, draft: Path) -> None:
    folder, params = model_folder("llama"), MIXED["seeded"]
    (full_output,) = make(folder).generate([[5, 6, 7]], params, use_tqdm=False)
    token_ids = list(full_output.outputs[0].token_ids)
    core = drafting(folder, draft).core
    core.add_request(
        EngineRequest(
            request_id="r", gateway_id="", prompt_token_ids=[5, 6, 7], sampling=params,
            resume_token_ids=[token_ids[:11]],
        )
    )  # fmt: skip
    deltas = []
    while core.has_work:
        deltas += core.step()
    assert [token for delta in deltas for token in delta.token_ids] == token_ids[11:]
    assert core.stats.spec_decode_num_accepted_tokens_total > 0


def test_an_aborted_sequence_gives_its_blocks(model_folder: Folder, draft: Path) -> None:
    llm = drafting(model_folder("llama"), draft)
    pool = llm.core.drafter.model.kv.pool
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, n=2)
    llm.llm_engine.add_request("r", {"prompt_token_ids": [5, 6, 7]}, params)
    for _ in range(5):
        llm.llm_engine.step()
    assert pool.num_free_blocks < pool.num_blocks
    llm.llm_engine.abort_request("r")
    llm.generate([[4, 4]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    llm.generate([[4, 4]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert len(llm.core.drafter.model._rows) <= 1
    llm.core.check_integrity()


def test_another_vocabulary_is_refused_by_the_token(model_folder: Folder, tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["magic"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"token 312 is 'magic' in its vocabulary") as caught:
        drafting(model_folder("llama"), tmp_path)
    assert caught.value.param == "speculative_config"


def test_a_device_that_runs_no_draft_models_refuses_one(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "runs_draft_models", False)
    folder = model_folder("llama")
    speculative_config = {
        "method": "draft_model",
        "model": str(folder),
        "num_speculative_tokens": 2,
    }
    with pytest.raises(ConfigError, match="methods ngram, suffix, medusa, mlp") as caught:
        make(folder, speculative_config=speculative_config)
    assert caught.value.param == "speculative_config"


def test_what_is_no_draft_is_refused_by_name(model_folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="speculative_config: There is no folder") as caught:
        drafting(model_folder("llama"), tmp_path / "nowhere")
    assert caught.value.param == "speculative_config"
