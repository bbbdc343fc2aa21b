"""Many adapters of different ranks in one batch, and what a row has alone it has among others."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from engine import LLM, LoRARequest, SamplingParams
from engine.contract.errors import InvalidRequest
from engine.contract.lora import WEIGHTS_FILE
from tests.engine.speculative.seer import Seer

from .adapters import pirate, write_adapter
from .peft_oracle import PeftOracle, checkpoint, make_adapter, prompts
from .test_peft_equality import ALL, COUNT, generate, serve

RANKS = [4, 8, 16, 32, 64, 128]
MAX_ADAPTERS = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        f"a{i}": make_adapter(
            model, folder / str(i), seed=i, r=RANKS[i % len(RANKS)], target_modules=ALL
        )
        for i in range(MAX_ADAPTERS)
    }


def requests(adapters: dict[str, Path]) -> dict[str | None, LoRARequest | None]:
    requests: dict[str | None, LoRARequest | None] = {None: None}
    for number, (name, folder) in enumerate(adapters.items(), 1):
        requests[name] = LoRARequest(name, number, str(folder))
    return requests


@pytest.mark.parametrize("count", [1, MAX_ADAPTERS])
def test_batches_that_mix_adapters_with_the_base_give_pefts_tokens(
    model: Path, adapters: dict[str, Path], count: int
) -> None:
    some = dict(list(adapters.items())[:count])
    names: list[str | None] = [None, *some, None, *list(some)[:3]]
    named_prompts = list(zip(prompts(len(names)), names, strict=True))
    asked = requests(some)
    llm = LLM(
        str(model), dtype="float32", skip_tokenizer_init=True, max_num_seqs=len(names),
        max_num_batched_tokens=100,
    )  # fmt: skip
    got = generate(llm, [(prompt, asked[name]) for prompt, name in named_prompts])
    assert got == PeftOracle(model, some).greedy_all(named_prompts, COUNT, got)
    assert len(llm.core.adapters.states()) == count


@pytest.mark.usefixtures("always_drafts")
def test_rows_with_drafts_go_through_their_own_adapters(
    model: Path, adapters: dict[str, Path]
) -> None:
    asked = requests(dict(list(adapters.items())[:3]))
    prompt_requests = [
        (prompt, asked[name])
        for prompt, name in zip(prompts(5), [None, "a2", "a0", None, "a1"], strict=True)
    ]
    expected = generate(serve(model), prompt_requests)
    Seer.texts = {
        tuple(prompt): [output]
        for (prompt, _), output in zip(prompt_requests, expected, strict=True)
    }
    drafting = serve(model, speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    assert generate(drafting, prompt_requests) == expected
    assert drafting.core.stats.spec_decode_num_accepted_tokens_total > 5


@pytest.mark.usefixtures("always_drafts")
def test_rows_of_adapters_get_the_base_models_drafts(
    model: Path, adapters: dict[str, Path]
) -> None:
    asked = requests(dict(list(adapters.items())[:2]))
    prompt_requests = list(zip(prompts(4), [None, asked["a1"], asked["a0"], None], strict=True))
    drafting = serve(model, speculative_config={"model": str(model), "num_speculative_tokens": 3})
    assert generate(drafting, prompt_requests) == generate(serve(model), prompt_requests)
    assert drafting.core.stats.spec_decode_num_accepted_tokens_total > 5
    drafting.core.check_integrity()


def test_log_probabilities_have_the_same_bits_alone_and_among_others(
    model: Path, adapters: dict[str, Path]
) -> None:
    asked = requests(dict(list(adapters.items())[:6]))
    names: list[str | None] = [None, *(name for name in asked if name), "a3", None]
    texts = prompts(len(names))
    params = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=3,
        prompt_logprobs=1,
    )  # fmt: skip

    def scores(llm: LLM, indices: list[int]) -> list[list[dict[int, float]]]:
        results = llm.generate(
            [{"prompt_token_ids": texts[i]} for i in indices], params, use_tqdm=False,
            lora_request=[asked[names[i]] for i in indices],
        )  # fmt: skip
        return [
            [
                {token: entry.logprob for token, entry in entries.items()}
                for entries in (
                    *(result.prompt_logprobs or [])[1:],
                    *(result.outputs[0].logprobs or []),
                )
            ]
            for result in results
        ]

    together = scores(serve(model), list(range(len(names))))
    llm = serve(model)
    for index, expected in enumerate(together):
        assert scores(llm, [index]) == [expected]


def test_a_cached_prompt_is_read_by_its_own_adapter_alone(
    model: Path, adapters: dict[str, Path]
) -> None:
    asked = requests(dict(list(adapters.items())[:2]))
    prompt = [token for some in prompts(6) for token in some]
    names = [None, "a0", "a1"]
    llm = serve(model, enable_prefix_caching=True)
    expected = PeftOracle(model, adapters).greedy_all([(prompt, name) for name in names], COUNT)
    for hits in (0, 1):
        llm.core.reset_stats()
        got = [generate(llm, [(prompt, asked[name])])[0] for name in names]
        assert got == expected
        size = llm.core.config.block_size
        cached = (len(prompt) - 1) // size * size
        assert cached > 0
        assert llm.core.scheduler.kv.num_hit_tokens == hits * len(names) * cached


def test_a_higher_rank_needs_no_restart_and_a_bound_is_kept(
    model: Path, adapters: dict[str, Path]
) -> None:
    asked = requests(adapters)
    llm = serve(model)
    for name in ("a0", "a5"):  # ranks 4 and 128
        assert len(generate(llm, [(prompts(1)[0], asked[name])])[0]) == COUNT
    bounded = serve(model, max_lora_rank=16)
    generate(bounded, [(prompts(1)[0], asked["a2"])])
    with pytest.raises(InvalidRequest, match=r"rank 32 is over max_lora_rank \(16\)"):
        generate(bounded, [(prompts(1)[0], asked["a3"])])


def test_fault_20_new_weights_under_an_old_path_never_meet_what_the_old_ones_left(
    model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """Re-uploaded under the same name, with its cache warm."""
    folder = tmp_path / "named"
    shutil.copytree(adapters["a0"], folder)
    asked, prompt = LoRARequest("same", 1, str(folder)), list(range(10, 60))
    oracle = PeftOracle(model, adapters)
    llm = serve(model)
    assert generate(llm, [(prompt, asked)])[0] == oracle.greedy(prompt, COUNT, "a0")
    shutil.rmtree(folder)
    shutil.copytree(adapters["a1"], folder)
    assert generate(llm, [(prompt, asked)])[0] == oracle.greedy(prompt, COUNT, "a1")
    hits = llm.core.stats.prefix_cache_hits_total
    assert generate(llm, [(prompt, asked), (prompt, None)]) == [
        oracle.greedy(prompt, COUNT, "a1"), oracle.greedy(prompt, COUNT, None),
    ]  # fmt: skip
    assert llm.core.snapshot().prefix_cache_hits_total > hits  # its own blocks it does find


def test_a_bad_adapter_fails_its_own_request_and_nobody_elses(
    model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(adapters["a0"], tmp_path / "bad")
    bad = LoRARequest("bad", 9, str(tmp_path / "bad"))
    bad.ref()
    (tmp_path / "bad" / WEIGHTS_FILE).write_bytes(b"not safetensors at all")
    asked = requests(adapters)
    llm, prompt = serve(model), prompts(1)[0]
    expected = generate(llm, [(prompt, asked["a1"])])
    with pytest.raises(InvalidRequest, match="safetensors"):
        generate(llm, [(prompt, bad)])
    assert generate(llm, [(prompt, asked["a1"])]) == expected
    llm.core.check_integrity()
    with pytest.raises(InvalidRequest) as refused:
        generate(llm, [(prompt, LoRARequest("gone", 1, str(tmp_path / "gone")))])
    assert refused.value.param == "lora_request"


def test_more_adapters_than_there_is_room_for_take_turns(
    model: Path, adapters: dict[str, Path]
) -> None:
    some = dict(list(adapters.items())[:8])
    names: list[str | None] = [*some, None] * 3
    named_prompts = list(zip(prompts(len(names)), names, strict=True))
    asked = requests(some)
    llm = serve(model, max_loras=2, max_cpu_loras=1)
    got = generate(llm, [(prompt, asked[name]) for prompt, name in named_prompts])
    assert got == PeftOracle(model, some).greedy_all(named_prompts, COUNT, got)
    states = llm.core.adapters.states()
    tiers = [state.tier for state in states]
    assert tiers.count("device") <= 2
    assert len(states) == 8
    assert llm.core.snapshot().adapter_evictions_total >= 6


def test_adapters_can_be_turned_off(model: Path, adapters: dict[str, Path]) -> None:
    llm = serve(model, enable_lora=False)
    with pytest.raises(InvalidRequest, match="enable_lora"):
        generate(llm, [(prompts(1)[0], requests(adapters)["a0"])])


def test_other_precisions_are_kept_where_they_are_asked_for(tmp_path: Path) -> None:
    config, tensors = pirate()
    folder = write_adapter(tmp_path, config, {k: v.float() for k, v in tensors.items()})
    asked = LoRARequest("wide", 1, str(folder))
    sizes = []
    for dtype in ("auto", "bfloat16"):
        llm = LLM("demo/model", lora_dtype=dtype)
        llm.generate("x", SamplingParams(max_tokens=1), use_tqdm=False, lora_request=asked)
        sizes.append(llm.core.adapters.states()[0].num_bytes)
    assert sizes[0] == 2 * sizes[1]
    assert torch.finfo(torch.bfloat16).bits == 16
