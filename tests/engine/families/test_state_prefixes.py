"""Prompts that share a prefix, with models that carry a state: it's computed once, and no bit of
what they say changes.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine import LLM, RequestOutput, SamplingParams
from engine.devices.cpu import CpuDevice
from tests.engine.speculative.free import make_drafts_free
from tests.survey.recipes import RECIPES, VOCAB
from tests.survey.tiny import make_checkpoint

NAMES = ("falcon_h1", "granite4", "jamba", "lfm2", "minimax", "nemotron_h", "qwen3_next")
#: Bits are compared by their log probabilities.
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param)
    make_checkpoint({**RECIPES[request.param], "max_position_embeddings": 4096}, folder)
    return folder


def make(folder: Path, **settings: object) -> LLM:
    settings = {"max_model_len": 4096, "num_gpu_blocks_override": 1200, **settings}
    return LLM(str(folder), dtype="float32", num_threads=1, **settings)  # type: ignore[arg-type]


def run(llm: LLM, prompts: list[list[int]], salt: str | None = None) -> list[RequestOutput]:
    """One after another."""
    outputs = []
    for prompt in prompts:
        request = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
        outputs += llm.generate([request], GREEDY, use_tqdm=False)
    llm.core.check_integrity()
    return outputs


def comparable(outputs: list[RequestOutput]) -> list[object]:
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def random_tokens(count: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(4, VOCAB) for _ in range(count)]


@pytest.mark.parametrize("shift", [0, 100, 333, 600])
def test_conversations_that_begin_alike_reuse_it(folder: Path, shift: int) -> None:
    """Two turns of three conversations, and the same with the cache off."""
    cached, cold = make(folder), make(folder, enable_prefix_caching=False)
    shared = random_tokens(1600 - shift, shift)
    for index, share in enumerate((0.0, 0.8, 0.95)):
        first = [*shared, *random_tokens(150 + 7 * index, 10 + index)]
        (output,) = run(cached, [first])
        assert output.num_cached_tokens >= share * len(shared)
        second = [*first, *output.outputs[0].token_ids, *random_tokens(90, 20 + index)]
        (answer,) = run(cached, [second])
        assert answer.num_cached_tokens >= len(first) - 16
        assert comparable([output, answer]) == comparable(run(cold, [first, second]))


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_prompts_that_end_where_chunks_do(folder: Path, extra: int) -> None:
    cached = make(folder, max_num_batched_tokens=64)
    cold = make(folder, max_num_batched_tokens=48, enable_prefix_caching=False)
    prompts = [random_tokens(length + extra, 1) for length in (64, 128, 192, 192, 64)]
    assert comparable(run(cached, prompts)) == comparable(run(cold, prompts))
    hit, queried = cached.core.scheduler.kv.num_hit_tokens, sum(map(len, prompts))
    assert hit >= 0.65 * (queried - 64)


def test_tenants_share_no_state(folder: Path) -> None:
    llm, prompt = make(folder), random_tokens(200, 3)
    first, other, again = (run(llm, [prompt], salt)[0] for salt in ("a", "b", "a"))
    assert [o.num_cached_tokens for o in (first, other, again)] == [0, 0, 192]
    assert comparable([first]) == comparable([other]) == comparable([again])


def test_what_was_preempted_goes_on_from_a_checkpoint(folder: Path) -> None:
    """All of it is recomputed without the cache; with it what follows the last checkpoint."""
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    prompts = [random_tokens(200, seed) for seed in range(4)]
    tokens = []
    for settings in ({}, {"num_gpu_blocks_override": 40}):
        llm = make(folder, max_model_len=512, max_num_batched_tokens=128, **settings)
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        tokens.append([output.outputs[0].token_ids for output in outputs])
        llm.core.check_integrity()
    assert llm.core.scheduler.num_preemptions > 0
    assert tokens[0] == tokens[1]


def test_many_prompts_at_once_with_few_blocks_of_states(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More sequences than there is memory for checkpoints of, planned ahead."""
    monkeypatch.setattr(CpuDevice, "max_checkpoints", lambda *_: 6)
    shared = random_tokens(300, 5)
    prompts = [[*shared, *random_tokens(20 + 3 * n, n)] for n in range(12)]
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    tokens = []
    for settings in (
        {"enable_prefix_caching": False},
        {"max_num_seqs": 3, "async_scheduling": True},
    ):
        llm = make(folder, max_model_len=1024, num_gpu_blocks_override=200, **settings)
        outputs = llm.generate(requests, GREEDY, use_tqdm=False)
        tokens.append(comparable(outputs))
        llm.core.check_integrity()
    states = llm.core.capacity.layout.state_group
    assert states is not None
    assert states.num_blocks == 3 + 6
    assert llm.core.scheduler.kv.num_hit_tokens > 0
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("caching", [False, True])
def test_drafts_that_fail_take_their_states_back(
    folder: Path, caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly all of a random model's are wrong; `tests/features` has right ones."""
    make_drafts_free(monkeypatch)
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True, logprobs=1)
    prompts = [random_tokens(9, seed) * 6 + random_tokens(seed, seed) for seed in range(1, 5)]
    requests = [{"prompt_token_ids": prompt} for prompt in prompts * 2]
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    results = []
    for settings in ({"enable_prefix_caching": False}, {"speculative_config": drafts}):
        llm = make(folder, max_model_len=512, **{"enable_prefix_caching": caching} | settings)
        outputs = llm.generate(requests, params, use_tqdm=False)
        results.append(comparable(outputs))
        llm.core.check_integrity()
    stats = llm.core.stats
    num_accepted = stats.spec_decode_num_accepted_tokens_total
    assert stats.spec_decode_num_draft_tokens_total > num_accepted
    assert results[0] == results[1]
