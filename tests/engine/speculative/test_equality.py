"""Drafts change nothing but how many tokens a step gives."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.contract.errors import ConfigError
from engine.contract.messages import EngineRequest
from engine.contract.reasoning import ReasoningParams
from engine.contract.structured_outputs import StructuredOutputsParams
from engine.offline.outputs import RequestOutput
from engine.scheduler import StepPlan, StepResult
from engine.worker.compiled_step import CompiledStepRunner
from tests.engine.models import VOCAB
from tests.engine.speculative.free import make_drafts_free
from tests.engine.speculative.seer import Seer

Folder = Callable[[str], Path]
MIXED = {
    "greedy": SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.9, seed=11, max_tokens=30, ignore_eos=True),
    "filters": SamplingParams(
        temperature=0.8, seed=5, top_k=40, top_p=0.9, min_p=0.02, max_tokens=24, ignore_eos=True
    ),
    "penalties": SamplingParams(
        temperature=0.8, seed=3, presence_penalty=0.7, frequency_penalty=0.3,
        repetition_penalty=1.2, max_tokens=28, ignore_eos=True,
    ),
    "bias": SamplingParams(
        temperature=0.7, seed=9, logit_bias={5: 3.0}, bad_words_token_ids=[[7, 8]], max_tokens=20
    ),
    "stops": SamplingParams(temperature=1.0, seed=2, stop_token_ids=list(range(4, 30))),
    "least": SamplingParams(
        temperature=1.0, seed=2, min_tokens=9, stop_token_ids=list(range(4, 60)), max_tokens=40
    ),
    "logprobs": SamplingParams(temperature=0.9, seed=1, logprobs=3, max_tokens=20),
    "prompt": SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=20),
    "several": SamplingParams(temperature=1.0, seed=8, n=3, max_tokens=16),
    "beams": SamplingParams(use_beam_search=True, best_of=3, n=1, temperature=0, max_tokens=8),
    "grammar": SamplingParams(
        temperature=1.0, seed=4, max_tokens=20,
        structured_outputs=StructuredOutputsParams(regex="[a-z ]{5,30}"),
    ),
    "grammar's end": SamplingParams(
        temperature=1.0, seed=6, max_tokens=20,
        structured_outputs=StructuredOutputsParams(regex="[a-z]{6}"),
    ),
    "scored grammar": SamplingParams(
        temperature=1.0, seed=12, max_tokens=16, logprobs=2, ignore_eos=True,
        structured_outputs=StructuredOutputsParams(choice=["one two three", "four five six"]),
    ),
    "reasoning": SamplingParams(
        temperature=1.0, seed=13, max_tokens=24, ignore_eos=True,
        thinking=ReasoningParams(end=[[9, 10]], budget=5),
    ),
    "reasoned grammar": SamplingParams(
        temperature=1.0, seed=14, max_tokens=24, n=2,
        thinking=ReasoningParams(end=[[9, 10]], budget=4),
        structured_outputs=StructuredOutputsParams(regex="[a-z ]{5,30}"),
    ),
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("always_drafts")


def make(folder: Path, **settings: Any) -> LLM:
    defaults = {"num_gpu_blocks_override": 400, "max_model_len": 256, "dtype": "float32"}
    return LLM(str(folder), **{**defaults, **settings})


def prompts(rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(4, VOCAB) for _ in range(rng.randint(1, 60))] for _ in MIXED]


def texts(outputs: list[RequestOutput]) -> list[list[tuple[Any, ...]]]:
    """What clients see but for log probabilities."""
    return [
        [
            (
                completion.token_ids,
                completion.text,
                completion.finish_reason,
                completion.stop_reason,
            )
            for completion in one.outputs
        ]
        for one in outputs
    ]


def run(llm: LLM, asked: list[list[int]], kinds: Collection[str] = MIXED) -> list[RequestOutput]:
    outputs = llm.generate(asked, [MIXED[kind] for kind in kinds], use_tqdm=False)
    llm.core.check_integrity()
    assert llm.core.scheduler.kv.pool.num_free_blocks == llm.core.capacity.num_blocks
    return outputs


@pytest.mark.parametrize("family", ["llama-rope3", "mistral", "qwen2-window"])
def test_every_way_of_choosing_gives_the_same_with_drafts(
    family: str, model_folder: Folder
) -> None:
    folder, asked = model_folder(family), prompts(random.Random(family))
    baseline = run(make(folder), asked)
    Seer.texts = {
        tuple(one): [list(completion.token_ids) for completion in out.outputs]
        for one, out in zip(asked, baseline, strict=True)
    }
    llm = make(folder, speculative_config={"method": "ngram", "num_speculative_tokens": 5})
    for turn in range(2):  # cold, then from the prefix cache
        drafted = run(llm, asked)
        assert texts(drafted) == texts(baseline), turn
        for was, now in zip(baseline, drafted, strict=True):
            for initial_output, after in zip(was.outputs, now.outputs, strict=True):
                assert (initial_output.logprobs is None) == (after.logprobs is None)
                for old, new in zip(
                    initial_output.logprobs or [], after.logprobs or [], strict=True
                ):
                    assert old.keys() == new.keys()
                    for token_id, score in old.items():
                        assert new[token_id].logprob == score.logprob
    stats = llm.core.stats
    assert stats.spec_decode_num_accepted_tokens_total > 100
    assert stats.spec_decode_num_accepted_tokens_total < stats.spec_decode_num_draft_tokens_total
    by_index = stats.spec_decode_num_accepted_tokens_per_pos_total
    assert sum(by_index) == stats.spec_decode_num_accepted_tokens_total
    assert by_index == sorted(by_index, reverse=True)


def test_drafts_are_taken_from_their_tenants_share_of_the_steps(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that hold as what they are, the others as a prompt's token, though nobody pays."""
    make_drafts_free(monkeypatch)
    served = {}
    for method in (None, {"method": "ngram", "num_speculative_tokens": 5}):
        llm = make(model_folder("llama"), speculative_config=method)
        counters = llm.core.scheduler.waiting.counters  # type: ignore[attr-defined]
        initial_total, stats = sum(counters.values()), llm.core.stats
        (output,) = llm.generate([[5, 6, 7]], MIXED["greedy"], use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 30
        drafts = stats.spec_decode_num_draft_tokens_total
        flight = output.flights[0]
        assert flight.num_draft_tokens == drafts
        lengths = llm.core.snapshot().histograms["request_spec_decode_accepted_length"]
        assert (sum(lengths.counts), lengths.total) == (
            int(method is not None),
            flight.mean_accepted_length,
        )
        Seer.texts = {(5, 6, 7): [list(output.outputs[0].token_ids)]}
        allocated_spec_decode_num_accepted_tokens_total = (
            stats.spec_decode_num_accepted_tokens_total
        )
        in_vain = drafts - allocated_spec_decode_num_accepted_tokens_total
        assert (allocated_spec_decode_num_accepted_tokens_total > 0, in_vain > 0) == (
            method is not None,
            method is not None,
        )
        served[method is None] = sum(counters.values()) - initial_total - in_vain
    assert served[True] == served[False]


@pytest.mark.usefixtures("compiler")
def test_steps_with_drafts_run_in_one_call(
    model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran_compiled: list[bool] = []
    inner = CompiledStepRunner.run

    def spy(self: CompiledStepRunner, plan: StepPlan) -> StepResult | None:
        result = inner(self, plan)
        if plan.drafts and plan.num_decodes == len(plan.seq_ids):
            ran_compiled.append(result is not None)
        return result

    folder = model_folder("llama")
    for dtype in ("float32", "bfloat16", "float16", "int8"):
        asked = prompts(random.Random(dtype))
        baseline = run(make(folder, kv_cache_dtype=dtype), asked)
        Seer.texts = {
            tuple(one): [list(completion.token_ids) for completion in out.outputs]
            for one, out in zip(asked, baseline, strict=True)
        }
        llm = make(folder, kv_cache_dtype=dtype, speculative_config={"method": "ngram"})
        with monkeypatch.context() as patch:
            patch.setattr(CompiledStepRunner, "run", spy)
            assert texts(run(llm, asked)) == texts(baseline), dtype
    assert len(ran_compiled) > 8
    assert all(ran_compiled)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_rounded_weights_give_the_same_with_drafts(bits: str, model_folder: Folder) -> None:
    folder, asked = model_folder("llama"), prompts(random.Random(bits))
    baseline = run(make(folder, quantization=bits), asked)
    Seer.texts = {
        tuple(one): [list(completion.token_ids) for completion in out.outputs]
        for one, out in zip(asked, baseline, strict=True)
    }
    llm = make(folder, quantization=bits, speculative_config={"method": "ngram"})
    drafted = run(llm, asked)
    assert texts(drafted) == texts(baseline)
    assert [[completion.logprobs for completion in out.outputs] for out in drafted] == [
        [completion.logprobs for completion in out.outputs] for out in baseline
    ]
    assert llm.core.stats.spec_decode_num_accepted_tokens_total > 100


def test_the_prefix_cache_holds_what_was_said_and_no_draft_that_failed(
    model_folder: Folder,
) -> None:
    """Whoever goes on from what was said finds it, with the bits of one who reads it anew."""
    folder, asked = model_folder("llama"), prompts(random.Random(21))
    kinds = [
        kind for kind, params in MIXED.items() if params.n == 1 and params.best_of in (None, 1)
    ]
    params = [MIXED[kind] for kind in kinds]
    baseline_llm = make(folder, enable_prefix_caching=False)
    outputs = baseline_llm.generate(asked[: len(kinds)], params, use_tqdm=False)
    Seer.texts = {tuple(out.prompt_token_ids): [list(out.outputs[0].token_ids)] for out in outputs}
    llm = make(folder, speculative_config={"method": "ngram"})
    drafted = llm.generate(asked[: len(kinds)], params, use_tqdm=False)
    assert texts(drafted) == texts(outputs)
    stats = llm.core.stats
    assert stats.spec_decode_num_accepted_tokens_total > 0
    assert stats.spec_decode_num_accepted_tokens_total < stats.spec_decode_num_draft_tokens_total
    longer = [[*out.prompt_token_ids, *out.outputs[0].token_ids, 9, 8, 7] for out in outputs]
    then = SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True)
    was, now = (llm.generate(longer, then, use_tqdm=False) for llm in (baseline_llm, llm))
    assert texts(now) == texts(was)
    assert [out.outputs[0].logprobs for out in now] == [out.outputs[0].logprobs for out in was]
    for out, again in zip(outputs, now, strict=True):
        registered_count = len(out.prompt_token_ids) + len(out.outputs[0].token_ids) - 1
        assert again.num_cached_tokens >= registered_count // 16 * 16 - 16


def test_a_stop_string_inside_drafts_ends_the_text_where_it_stands(model_folder: Folder) -> None:
    folder, prompt = model_folder("llama"), [5, 6, 7]
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=60, ignore_eos=True)
    (baseline_output,) = make(folder).generate([prompt], params, use_tqdm=False)
    Seer.texts, Seer.rng = (
        {tuple(prompt): [list(baseline_output.outputs[0].token_ids)]},
        random.Random(0),
    )
    Seer.rng.random = lambda: 1.0  # type: ignore[method-assign]
    text = baseline_output.outputs[0].text
    stops = {text[index : index + 2] for index in range(4, len(text) - 4, 7)}
    llm = make(folder, speculative_config={"method": "ngram", "num_speculative_tokens": 7})
    asked = [
        SamplingParams(
            temperature=0.9, seed=3, max_tokens=60, ignore_eos=True, stop=[stop],
            include_stop_str_in_output=bool(number % 2),
        )
        for number, stop in enumerate(sorted(stops))
    ]  # fmt: skip
    assert len(asked) > 3
    was = make(folder).generate([prompt] * len(asked), asked, use_tqdm=False)
    now = llm.generate([prompt] * len(asked), asked, use_tqdm=False)
    assert texts(now) == texts(was)
    assert all(output.outputs[0].finish_reason == "stop" for output in now)
    assert llm.core.stats.spec_decode_num_accepted_tokens_total > 0
    llm.core.check_integrity()


def test_preempted_rows_with_drafts_say_the_same(model_folder: Folder) -> None:
    folder, asked = model_folder("llama"), prompts(random.Random(3))
    baseline = run(make(folder), asked)
    Seer.texts = {
        tuple(one): [list(completion.token_ids) for completion in out.outputs]
        for one, out in zip(asked, baseline, strict=True)
    }
    few = {"num_gpu_blocks_override": 14, "max_model_len": 128}
    llm = make(folder, speculative_config={"method": "ngram"}, **few)
    assert texts(run(llm, asked)) == texts(baseline)
    assert llm.core.scheduler.num_preemptions > 0


@pytest.mark.parametrize("cap", [1, 2, 7, 11])
def test_a_token_cap_inside_drafts_holds_to_the_token(cap: int, model_folder: Folder) -> None:
    folder, prompt = model_folder("llama"), [5, 6, 7]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (baseline_output,) = make(folder).generate([prompt], params, use_tqdm=False)
    token_ids = list(baseline_output.outputs[0].token_ids)
    Seer.texts, Seer.rng = {tuple(prompt): [token_ids]}, random.Random(0)
    core = make(folder, speculative_config={"method": "ngram"}).core
    core.add_request(
        EngineRequest(
            request_id="r", gateway_id="", prompt_token_ids=prompt, sampling=params, token_cap=cap
        )
    )
    deltas = []
    while core.has_work:
        deltas += core.step()
    assert [token for delta in deltas for token in delta.token_ids] == token_ids[:cap]
    assert deltas[-1].finish_reason == "budget"


def test_drafts_that_hold_take_fewer_steps_and_come_in_one_delta(model_folder: Folder) -> None:
    folder, prompt = model_folder("llama"), [5, 6, 7]
    params = SamplingParams(temperature=0, max_tokens=31, ignore_eos=True)
    (baseline_output,) = make(folder).generate([prompt], params, use_tqdm=False)
    Seer.texts = {tuple(prompt): [list(baseline_output.outputs[0].token_ids)]}
    Seer.rng = random.Random(0)
    Seer.rng.random = lambda: 1.0  # type: ignore[method-assign]
    core = make(folder, speculative_config={"method": "ngram", "num_speculative_tokens": 5}).core
    core.add_request(
        EngineRequest(request_id="r", gateway_id="", prompt_token_ids=prompt, sampling=params)
    )
    deltas = []
    while core.has_work:
        deltas += core.step()
    assert [len(delta.token_ids) for delta in deltas if delta.token_ids] == [1, 6, 6, 6, 6, 6]
    flight = deltas[-1].flight
    assert flight is not None
    assert (flight.num_draft_tokens, flight.num_accepted_tokens) == (25, 25)


def test_settings_that_drafts_cannot_be_checked_under_are_refused(model_folder: Folder) -> None:
    with pytest.raises(ConfigError, match="leave it out, or turn it off") as caught:
        make(model_folder("llama"), speculative_config={"method": "ngram"}, async_scheduling=True)
    assert caught.value.param == "speculative_config"
