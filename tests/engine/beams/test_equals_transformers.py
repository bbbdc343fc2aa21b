"""Beam search finds what `transformers` finds on the same weights, with the same scores."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.offline.beam_search import BeamSearchParams
from tests.engine.models import VOCAB, Oracle, make_model

ENDS = [2, *range(20, 384, 20)]
#: Without a bound on what is still to come a penalty's sign matters, else not.
CHOICES: list[tuple[float, bool | str]] = [
    (0.0, "never"), (1.0, "never"), (2.0, "never"), (-0.7, "never"),
    (1.0, False), (-0.7, False), (0.0, True), (2.0, True),
]  # fmt: skip
Search = tuple[list[list[int]], list[float]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small weights, so that likelihoods lie close together; one token in twenty ends an output."""
    folder = tmp_path_factory.mktemp("beams")
    return make_model("llama", folder, initializer_range=0.12, eos_token_id=ENDS)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), num_gpu_blocks_override=400, block_size=4, max_model_len=128)


def prompts(count: int = 4) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(4, VOCAB) for _ in range(length)] for length in (3, 9, 17, 24)[:count]]


def reference(oracle: Oracle, prompt: list[int], params: BeamSearchParams) -> Search:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        outputs = oracle.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_id=-1 if params.ignore_eos else ENDS,
            pad_token_id=3,
            return_dict_in_generate=True,
            output_scores=True,
        )
    rows = outputs.sequences[:, len(prompt) :].tolist()
    if not params.ignore_eos:
        rows = [_until_end(row) for row in rows]
    return rows, outputs.sequences_scores.tolist()


def _until_end(row: list[int]) -> list[int]:
    """Without what fills up shorter outputs: the token that ends one is its last."""
    length = next((index for index, token in enumerate(row) if token in ENDS), len(row))
    return row[: length + 1]


def search(llm: LLM, prompt_list: list[list[int]], params: BeamSearchParams) -> list[Search]:
    searches = []
    for prompt, output in zip(prompt_list, llm.beam_search(prompt_list, params), strict=True):
        rows = [beam.tokens[len(prompt) :] for beam in output.sequences]
        searches.append((rows, [beam.score for beam in output.sequences]))
    llm.core.check_integrity()
    assert llm.core.scheduler.kv.pool.num_free_blocks == llm.core.capacity.num_blocks
    return searches


def same(search_result: Search, expected: Search) -> None:
    assert search_result[0] == expected[0]
    assert search_result[1] == pytest.approx(expected[1], abs=2e-4)


@pytest.mark.parametrize(("penalty", "stopping"), CHOICES)
def test_tokens_and_scores(llm: LLM, oracle: Oracle, penalty: float, stopping: bool | str) -> None:
    ends: list[bool] = []
    params = BeamSearchParams(
        4, 12, length_penalty=penalty, early_stopping=stopping, include_stop_str_in_output=True
    )
    for prompt, result in zip(prompts(3), search(llm, prompts(3), params), strict=True):
        expected = reference(oracle, prompt, params)
        same(result, expected)
        ends += [row[-1] in ENDS for row in expected[0]]
    assert any(ends) or penalty > 1  # which favours long outputs


@pytest.mark.parametrize("width", [1, 2, 7])
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_widths_with_and_without_eos(
    llm: LLM, oracle: Oracle, width: int, ignore_eos: bool
) -> None:
    params = BeamSearchParams(width, 9, ignore_eos=ignore_eos, include_stop_str_in_output=True)
    match = search(llm, prompts(2), params)
    for prompt, result in zip(prompts(2), match, strict=True):
        if width == 1:  # transformers takes one beam for greedy search, which has no scores
            continue
        same(result, reference(oracle, prompt, params))
    if width == 1 and ignore_eos:
        assert match[0][0] == [oracle.greedy(prompts()[0], 9)]


CHANGES: list[dict[str, Any]] = [
    {"enable_prefix_caching": False},
    {"max_num_batched_tokens": 8},
    {"max_num_seqs": 3},
    # Less than four beams need, so that some are preempted or give up their blocks.
    {"num_gpu_blocks_override": 14},
    {"scheduling_policy": "priority", "num_gpu_blocks_override": 30},
    {"async_scheduling": True},
    {"async_scheduling": True, "num_gpu_blocks_override": 16, "max_num_batched_tokens": 9},
    {"block_size": 16, "cpu_kernels": False},
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_however_the_engine_is_set_up(llm: LLM, folder: Path, changes: dict[str, Any]) -> None:
    params = BeamSearchParams(4, 12, include_stop_str_in_output=True)
    settings = {"num_gpu_blocks_override": 400, "block_size": 4, "max_model_len": 128, **changes}
    other = LLM(str(folder), **settings)
    for result, expected in zip(
        search(other, prompts(), params), search(llm, prompts(), params), strict=True
    ):
        same(result, expected)


def test_searches_beside_other_requests(llm: LLM) -> None:
    params = BeamSearchParams(3, 10).sampling_params()
    baseline_sampling_params = SamplingParams(
        temperature=1.0, seed=5, max_tokens=20, ignore_eos=True
    )
    isolated_outputs = [
        llm.generate([prompt], prompt_params, use_tqdm=False)[0]
        for prompt, prompt_params in zip(
            prompts(),
            [params, baseline_sampling_params, params, baseline_sampling_params],
            strict=True,
        )
    ]
    together = llm.generate(
        prompts(),
        [params, baseline_sampling_params, params, baseline_sampling_params],
        use_tqdm=False,
    )
    for one, other in zip(isolated_outputs, together, strict=True):
        assert [o.token_ids for o in one.outputs] == [o.token_ids for o in other.outputs]
