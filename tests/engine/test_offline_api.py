"""The offline classes beside `LLM.generate`: steps by hand, asyncio, queues, operators' calls."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from transformers import AutoTokenizer

from engine import (
    LLM,
    AsyncLLM,
    AsyncLLMEngine,
    EngineArgs,
    FlexibleArgumentParser,
    Histogram,
    LLMEngine,
    PoolingParams,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import (
    ContextLengthExceeded,
    EngineFault,
    EnginePaused,
    EngineSleeping,
    InvalidRequest,
    ModelLoadError,
)
from engine.contract.messages import TokenDelta
from engine.offline.outputs import FlatLogprobs

SMALL: dict[str, Any] = {"num_gpu_blocks_override": 200, "max_model_len": 128, "block_size": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=6)
TEXTS = ["the quick brown fox", "the lazy dog", "the"]


@pytest.fixture(scope="module")
def folder(model_folder: Callable[[str], Path]) -> str:
    return str(model_folder("llama"))


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    llm = LLM(folder, **SMALL, enable_sleep_mode=True)
    yield llm
    llm.core.check_integrity()


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_log_probabilities_may_come_in_plain_lists(llm: LLM) -> None:
    asked = SamplingParams(max_tokens=6, seed=3, n=2, logprobs=2, prompt_logprobs=1)
    dicts, flat = (
        llm.generate(TEXTS[0], params, use_tqdm=False)[0]
        for params in (asked, msgspec.structs.replace(asked, flat_logprobs=True))
    )
    for expected, output in zip(dicts.outputs, flat.outputs, strict=True):
        logprobs = output.logprobs
        assert isinstance(logprobs, FlatLogprobs)
        assert list(logprobs) == expected.logprobs
        assert (len(logprobs), logprobs[-1], list(logprobs[1:3])) == (
            6,
            logprobs[5],
            [logprobs[1], logprobs[2]],
        )
        assert len(logprobs.token_ids) == len(logprobs.ranks) == logprobs.end_indices[-1]
    assert isinstance(flat.prompt_logprobs, FlatLogprobs)
    assert [
        prompt_logprob or None for prompt_logprob in flat.prompt_logprobs
    ] == dicts.prompt_logprobs
    with pytest.raises(InvalidRequest, match="flat_logprobs"):
        SamplingParams(flat_logprobs=1)  # type: ignore[arg-type]


# -- LLMEngine -----------------------------------------------------------------------------------


def test_an_engine_runs_a_step_at_a_time(folder: str, llm: LLM) -> None:
    parser = FlexibleArgumentParser(description="try it")
    parser = EngineArgs.add_cli_args(parser)
    line = (
        f"--model {folder} --max_model_len 128 --block-size 4 --num-gpu-blocks-override 200 -tp 1"
    )
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(parser.parse_args(line.split())))
    expected = tokens(llm.generate(TEXTS, GREEDY, use_tqdm=False))
    todo = list(enumerate(TEXTS))
    seen: dict[str, list[RequestOutput]] = {}
    while todo or engine.has_unfinished_requests():
        if todo:
            number, text = todo.pop(0)
            assert engine.add_request(str(number), text, GREEDY) == str(number)
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            seen.setdefault(output.request_id, []).append(output)
    for number, text in enumerate(TEXTS):
        steps = seen[str(number)]
        assert steps[-1].finished
        assert not any(step.finished for step in steps[:-1])
        assert [len(step.outputs[0].token_ids) for step in steps] == [1, 2, 3, 4, 5, 6]
        assert steps[-1].outputs[0].token_ids == expected[number]
        assert steps[2].outputs[0].token_ids == expected[number][:3]
        assert steps[-1].prompt == text
    engine.core.check_integrity()
    engine.shutdown()


def test_a_request_may_be_stopped_and_its_id_used_again(llm: LLM) -> None:
    engine = llm.llm_engine
    endless = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    engine.add_request("a", "the", endless)
    engine.add_request("b", "the", endless)
    with pytest.raises(InvalidRequest, match="in use"):
        engine.add_request("a", "the", endless)
    engine.step()
    engine.abort_request("a")
    engine.abort_request(["a", "b", "nobody"])
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    engine.add_request("a", "the", GREEDY)
    assert engine.get_num_unfinished_requests() == 1
    while engine.has_unfinished_requests():
        engine.step()


def test_adapters_and_tokenization_kwargs_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        llm.generate("the", GREEDY, lora_request=object())
    assert refusal.value.param == "lora_request"
    with pytest.raises(InvalidRequest) as refusal:
        llm.llm_engine.add_request("x", "the", GREEDY, tokenization_kwargs={"truncation": True})
    assert refusal.value.param == "tokenization_kwargs"


# -- AsyncLLM ------------------------------------------------------------------------------------


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(folder: str) -> AsyncIterator[AsyncLLM]:
    engine = AsyncLLM.from_engine_args(EngineArgs(model=folder, **SMALL))
    yield engine
    engine.shutdown()


async def last(engine: AsyncLLM, prompt: Any, params: SamplingParams, name: str) -> RequestOutput:
    return [result async for result in engine.generate(prompt, params, name)][-1]


@pytest.mark.asyncio(loop_scope="module")
async def test_many_coroutines_are_answered_at_once(engine: AsyncLLM, llm: LLM) -> None:
    expected = tokens(llm.generate(TEXTS * 3, GREEDY, use_tqdm=False))
    names = [f"many-{number}" for number in range(9)]
    results = await asyncio.gather(
        *(last(engine, text, GREEDY, name) for text, name in zip(TEXTS * 3, names, strict=True))
    )
    assert tokens(results) == expected
    assert all(result.finished for result in results)
    assert engine.is_running
    await engine.check_health()
    assert AsyncLLMEngine is AsyncLLM


@pytest.mark.asyncio(loop_scope="module")
async def test_ids_and_parameters_may_be_left_out(
    engine: AsyncLLM, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    results = [[output async for output in engine.generate(inputs=text)][-1] for text in TEXTS]
    assert len({result.request_id for result in results}) == 3
    assert all(result.finished for result in results)
    await engine.do_log_stats()
    assert "generation throughput: " in caplog.messages[-1]
    assert engine.model_config.max_model_len == 128


@pytest.mark.asyncio(loop_scope="module")
async def test_outputs_are_handed_over_as_they_are_wanted(engine: AsyncLLM) -> None:
    asked = SamplingParams(max_tokens=12, seed=5, n=2, logprobs=1, prompt_logprobs=1)
    results = {
        kind: [
            result
            async for result in engine.generate(
                TEXTS[0], msgspec.structs.replace(asked, output_kind=kind), kind.name
            )
        ]
        for kind in RequestOutputKind
    }
    (full_output,) = results[RequestOutputKind.FINAL_ONLY]
    assert results[RequestOutputKind.CUMULATIVE][-1].outputs == full_output.outputs
    deltas = results[RequestOutputKind.DELTA]
    assert len(deltas) > 3
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs] == [
        full_output.prompt_logprobs
    ]
    for expected in full_output.outputs:
        parts = [part for delta in deltas for part in delta.outputs if part.index == expected.index]
        assert "".join(part.text for part in parts) == expected.text
        assert list(chain(*(part.token_ids for part in parts))) == expected.token_ids
        assert list(chain(*(part.logprobs for part in parts))) == expected.logprobs
        assert all(part.token_ids or part.text or part.finished for part in parts)
        finished_part = parts[-1]
        assert (finished_part.finish_reason, finished_part.cumulative_logprob) == (
            expected.finish_reason,
            expected.cumulative_logprob,
        )


@pytest.mark.parametrize(
    "options",
    [
        {"output_kind": 1},
        {"output_kind": RequestOutputKind.DELTA, "best_of": 2},
        {"output_kind": RequestOutputKind.DELTA, "use_beam_search": True, "n": 2},
    ],
)
def test_a_kind_of_output_that_cant_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="output_kind") as caught:
        SamplingParams(**options)
    assert caught.value.param == "output_kind"


def test_whole_results_are_whole_whatever_kind_is_asked_for(llm: LLM) -> None:
    deltas = msgspec.structs.replace(GREEDY, output_kind=RequestOutputKind.DELTA)
    outputs, expected = (llm.generate(TEXTS, params, use_tqdm=False) for params in (deltas, GREEDY))
    assert tokens(outputs) == tokens(expected)


@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_stands_still_and_goes_on(engine: AsyncLLM, slow_steps: None) -> None:
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    expected = await last(engine, "the", long, "unpaused")
    stream = engine.generate("the", long, "held")
    first = await anext(stream)
    await engine.pause_generation(mode="keep")
    assert await engine.is_paused()
    joined = asyncio.create_task(last(engine, TEXTS[1], GREEDY, "joins"))
    steps = engine.engine.core.snapshot().steps_total
    await asyncio.sleep(0.05)
    assert engine.engine.core.snapshot().steps_total == steps
    await engine.resume_generation()
    results = [first] + [result async for result in stream]
    assert tokens(results[-1:]) == tokens([expected])
    assert (await joined).finished
    assert not await engine.is_paused()


@pytest.fixture
def slow_steps(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 20 ms: a stream of a hundred tokens still runs when it's left or aborted."""
    step = engine.engine.core.step

    def slow_step() -> list[TokenDelta]:
        time.sleep(0.02)
        return step()

    monkeypatch.setattr(engine.engine.core, "step", slow_step)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_pause_lets_requests_end_or_ends_them(engine: AsyncLLM, slow_steps: None) -> None:
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    lasting = engine.generate("the", long, "lasts")
    await anext(lasting)
    await engine.pause_generation(mode="wait")
    assert not engine.engine.has_unfinished_requests()
    assert len([result async for result in lasting][-1].outputs[0].token_ids) == 100
    with pytest.raises(EnginePaused):
        await last(engine, "the", GREEDY, "refused")
    await engine.resume_generation()
    stream = engine.generate("the", long, "ended")
    await anext(stream)
    await engine.pause_generation()
    with pytest.raises(EngineFault, match="aborted"):
        async for _ in stream:
            pass
    with pytest.raises(InvalidRequest, match="abort, wait, keep"):
        await engine.pause_generation(mode="soon")
    await engine.resume_generation()
    assert (await last(engine, "the", GREEDY, "after")).finished


@pytest.mark.asyncio(loop_scope="module")
async def test_a_consumer_that_stops_listening_aborts(engine: AsyncLLM, slow_steps: None) -> None:
    endless = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    stream = engine.generate("the", endless, "left")
    assert not (await anext(stream)).finished
    await stream.aclose()
    assert (await last(engine, "the", GREEDY, "left")).finished
    assert engine.engine.get_num_unfinished_requests() == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_abort_ends_the_stream_with_an_error(engine: AsyncLLM, slow_steps: None) -> None:
    endless = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    stream = engine.generate("the", endless, "aborted")
    await anext(stream)
    await engine.abort("aborted")
    with pytest.raises(EngineFault, match="aborted"):
        async for _ in stream:
            pass
    await engine.abort(["nobody"])


@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_refused_is_told_and_hurts_nobody(engine: AsyncLLM) -> None:
    with pytest.raises(InvalidRequest):
        await anext(engine.generate([10**6], GREEDY, "bad"))
    with pytest.raises(InvalidRequest):
        await anext(engine.generate({"promt": "x"}, GREEDY, "bad"))
    assert (await last(engine, "the", GREEDY, "bad")).finished
    assert await engine.reset_prefix_cache()
    assert (await engine.get_model_config()).max_model_len == 128
    assert (await engine.get_decoding_config()).guided_decoding_backend == "guidance"
    assert await engine.get_supported_tasks() == ("generate",)
    assert {metric.name for metric in await engine.get_metrics()} >= {"vllm:prompt_tokens"}


@pytest.mark.asyncio
async def test_after_shutdown_nothing_hangs(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = AsyncLLM(EngineConfig(model=folder, **SMALL))
    step = engine._step

    def slow_step(core: LLMEngine) -> None:
        time.sleep(0.02)  # it must not end before the shutdown
        step(core)

    monkeypatch.setattr(engine, "_step", slow_step)
    endless = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    stream = engine.generate("the", endless, "a")
    await anext(stream)
    await asyncio.to_thread(engine.shutdown)
    engine.shutdown()
    with pytest.raises(EngineFault):
        async for _ in stream:
            pass
    with pytest.raises(EngineFault):
        await anext(engine.generate("the", GREEDY, "b"))
    with pytest.raises(EngineFault):
        await engine.check_health()
    assert not engine.is_running
    assert not engine.errored


def test_a_model_that_cant_be_loaded_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        AsyncLLM(EngineConfig(model=str(tmp_path)))


# -- LLM -----------------------------------------------------------------------------------------


def test_prompts_are_queued_first_and_run_later(llm: LLM) -> None:
    expected = tokens(llm.generate(TEXTS, GREEDY, use_tqdm=False))
    ids = llm.enqueue(TEXTS[:2], GREEDY)
    ids += llm.enqueue(TEXTS[2], [GREEDY])
    assert len(set(ids)) == 3
    between = llm.generate("the", GREEDY, use_tqdm=False)
    assert between[0].finished
    results = llm.wait_for_completion(RequestOutput, use_tqdm=False)
    assert [result.request_id for result in results] == ids
    assert tokens(results) == expected
    assert llm.wait_for_completion() == []
    with pytest.raises(InvalidRequest):
        llm.enqueue(["the", [10**6]], GREEDY)
    assert llm.llm_engine.get_num_unfinished_requests() == 0


def test_what_waits_for_a_sleeping_model_doesnt_hang(llm: LLM) -> None:
    llm.enqueue("the", GREEDY)
    llm.sleep()
    assert llm.is_sleeping()
    with pytest.raises(EngineSleeping, match="sleeps"):
        llm.wait_for_completion(use_tqdm=False)
    llm.wake_up()
    assert llm.generate("the", GREEDY, use_tqdm=False)[0].finished


def test_outputs_tell_when_what_happened(llm: LLM) -> None:
    (output,) = llm.generate("the quick brown fox", GREEDY, use_tqdm=False)
    metrics = output.metrics
    assert metrics is not None
    assert metrics.scheduled_ts is not None
    assert metrics.first_token_ts is not None
    assert metrics.last_token_ts is not None
    assert metrics.arrival_time <= metrics.scheduled_ts <= metrics.first_token_ts
    assert metrics.first_token_ts <= metrics.last_token_ts
    assert metrics.num_generation_tokens == len(output.outputs[0].token_ids)
    assert metrics.first_token_latency == metrics.first_token_ts - metrics.arrival_time
    assert metrics.time_in_queue == metrics.first_scheduled_time - metrics.queued_ts
    assert (metrics.first_token_time, metrics.last_token_time, metrics.finished_time) == (
        metrics.first_token_ts, metrics.last_token_ts, metrics.last_token_ts,
    )  # fmt: skip
    assert len(output.flights) == 1


def test_arguments_by_their_place(folder: str, llm: LLM) -> None:
    new_llm = LLM(
        folder, None, "auto", False, False, 1, "auto", None, None, None, 7, 0.9, 4, **SMALL
    )
    assert new_llm.config.seed == 7
    expected = tokens(llm.generate(TEXTS, GREEDY, None, False))
    ids = [new_llm.get_tokenizer().encode(text) for text in TEXTS]
    assert tokens(new_llm.generate(None, GREEDY, ids, False, None)) == expected
    with pytest.raises(TypeError, match="two values"):
        LLM(folder, "a", tokenizer="b")
    with pytest.raises(TypeError, match="at most"):
        LLM(folder, *([None] * 17))
    bars: list[dict[str, Any]] = []

    class Bar:
        def __init__(self, **iterable: Any) -> None:
            bars.append(iterable)

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None: ...

        def update(self, count: int = 1) -> None:
            bars.append({"count": count})

    new_llm.generate("the", GREEDY, use_tqdm=Bar)
    assert bars[0]["total"] == 1
    assert sum(bar.get("count", 0) for bar in bars) == 1


def test_an_output_ends_where_the_context_does(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    for length in (4, 127):
        (output,) = llm.generate([[5] * length], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 128 - length
        assert output.outputs[0].finish_reason == "length"
    for length in (128, 500):
        with pytest.raises(ContextLengthExceeded) as refusal:
            llm.generate([[5], [5] * length], params, use_tqdm=False)
        assert isinstance(refusal.value, ValueError)
        assert str(length) in refusal.value.message


def test_another_tokenizer(folder: str, llm: LLM) -> None:
    local_tokenizer = llm.get_tokenizer()
    expected = llm.generate("the lazy dog", GREEDY, use_tqdm=False)[0].outputs[0].text
    try:
        for other in (folder, AutoTokenizer.from_pretrained(folder), local_tokenizer):
            llm.set_tokenizer(other)
            assert (
                llm.generate("the lazy dog", GREEDY, use_tqdm=False)[0].outputs[0].text == expected
            )
        with pytest.raises(InvalidRequest) as refusal:
            llm.set_tokenizer(5)
        assert refusal.value.param == "tokenizer"
    finally:
        llm.set_tokenizer(local_tokenizer)


def test_a_tokenizer_does_what_programs_ask_of_the_librarys(folder: str, llm: LLM) -> None:
    ours, theirs = llm.get_tokenizer(), AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "the fox"}]
    for options in ({}, {"add_generation_prompt": True}):
        text = theirs.apply_chat_template(chat, tokenize=False, **options)
        assert ours.apply_chat_template(chat, tokenize=False, **options) == text
        ids = theirs(text, add_special_tokens=False).input_ids
        assert ours.apply_chat_template(chat, **options) == ids
        assert ours.apply_chat_template([chat, chat], **options) == [ids, ids]
    with pytest.raises(InvalidRequest) as refusal:
        ours.apply_chat_template(chat, return_tensors="pt")
    assert refusal.value.param == "return_tensors"
    for text in ("the lazy dog", TEXTS):
        assert ours(text).input_ids == theirs(text).input_ids
        assert ours(text)["attention_mask"] == theirs(text)["attention_mask"]
    tokens = theirs.convert_ids_to_tokens([5, 60, 200])
    assert ours.convert_ids_to_tokens([5, 60, 200]) == tokens
    assert ours.convert_tokens_to_ids(tokens) == [5, 60, 200]
    assert ours.convert_tokens_to_ids(tokens[0]) == 5
    assert ours.get_vocab() == theirs.get_vocab()
    assert len(ours) == len(theirs)
    assert set(ours.all_special_ids) >= set(theirs.all_special_ids)
    assert (ours.bos_token, ours.eos_token) == (theirs.bos_token, theirs.eos_token)
    assert (ours.pad_token, ours.pad_token_id) == (theirs.pad_token, theirs.pad_token_id)
    ids = ours.encode("the lazy dog")
    assert ours.batch_decode([ids]) == theirs.batch_decode([ids], skip_special_tokens=True)


def test_a_cache_may_be_forgotten(llm: LLM) -> None:
    text = "the quick brown fox jumps over the lazy dog and the fox"
    llm.generate(text, GREEDY, use_tqdm=False)
    assert llm.generate(text, GREEDY, use_tqdm=False)[0].num_cached_tokens > 0
    assert llm.reset_prefix_cache() is True
    assert llm.generate(text, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_what_runs_goes_on_whatever_an_operator_does(folder: str, *, ahead: bool) -> None:
    config = EngineConfig(model=folder, **SMALL, enable_sleep_mode=True, async_scheduling=ahead)
    engine = LLMEngine(config)
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    token_ids: dict[str, list[int]] = {}

    def step(times: int = 1) -> None:
        for _ in range(times):
            for result in engine.step():
                assert isinstance(result, RequestOutput)
                token_ids[result.request_id] = list(result.outputs[0].token_ids)

    engine.add_request("alone", "the", long)
    while engine.has_unfinished_requests():
        step()
    for name in ("reset", "slept"):
        engine.add_request(name, "the", long)
    step(5)
    assert engine.reset_prefix_cache() is False
    assert engine.reset_prefix_cache(reset_running_requests=True) is True
    step(5)
    for level in (1, 2):
        engine.sleep(level)
        step()
        assert engine.has_unfinished_requests()
        engine.wake_up()
        step(5)
    while engine.has_unfinished_requests():
        step()
    assert token_ids["reset"] == token_ids["slept"] == token_ids["alone"]
    assert len(token_ids["alone"]) == 40
    engine.core.check_integrity()
    engine.shutdown()


def test_what_ends_as_an_engine_falls_asleep_is_handed_over(folder: str) -> None:
    config = EngineConfig(model=folder, **SMALL, enable_sleep_mode=True, async_scheduling=True)
    engine = LLMEngine(config)
    engine.add_request("last", "the", SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    tokens = 0
    while tokens < 1:
        tokens = sum(len(result.outputs[0].token_ids) for result in engine.step())
    engine.sleep()
    assert engine.has_work
    (result,) = engine.step()
    assert result.finished
    assert not engine.has_work
    engine.shutdown()


def test_chats_are_queued_first_and_run_later(llm: LLM) -> None:
    chats: Any = [[{"role": "user", "content": text}] for text in TEXTS]
    now = llm.chat(chats, GREEDY, use_tqdm=False)
    expected, tokenizer = tokens(now), llm.get_tokenizer()
    for chat, output in zip(chats, now, strict=True):
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert output.prompt == text
    ids = llm.enqueue_chat(chats, GREEDY)
    results = llm.wait_for_completion(use_tqdm=False)
    assert [result.request_id for result in results] == ids
    assert tokens(results) == expected


def test_old_names_and_defaults_of_the_engines_calls(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    engine = llm.llm_engine
    caplog.set_level("INFO")
    engine.add_request("old", inputs="the", params=GREEDY)
    engine.add_request("bare", "the")
    with pytest.raises(TypeError, match="give one of them"):
        engine.add_request("both", "the", GREEDY, inputs="the")
    with pytest.raises(TypeError, match="'prompt'"):
        engine.add_request("none", params=GREEDY)
    while engine.has_unfinished_requests():
        engine.step()
    engine.do_log_stats()
    assert "generation throughput: " in caplog.messages[-1]
    assert engine.model_config.max_model_len == llm.model_config.max_model_len == 128


def test_settings_and_facts_under_vllms_names(llm: LLM) -> None:
    vllm_config = llm.llm_engine.vllm_config
    model = vllm_config.model_config
    assert model.hf_config.model_type == model.hf_text_config.model_type == "llama"
    assert model.hf_config.vocab_size == model.get_vocab_size()
    assert model.hf_config.hidden_size == model.get_hidden_size()
    assert (model.max_model_len, str(model.dtype)) == (128, "torch.float32")
    assert vllm_config.cache_config.num_gpu_blocks == llm.core.capacity.num_blocks
    assert vllm_config.scheduler_config.max_num_batched_tokens == llm.core.capacity.token_budget
    assert vllm_config.parallel_config.world_size == 1
    assert vllm_config.device_config.device_type == "cpu"
    assert (vllm_config.lora_config is None, vllm_config.speculative_config) == (False, None)


def test_figures_under_vllms_names(llm: LLM) -> None:
    def value(name: str) -> float:
        return sum(metric.value for metric in llm.get_metrics() if metric.name == name)

    initial = value("vllm:generation_tokens"), value("vllm:request_success")
    llm.generate(TEXTS, GREEDY, use_tqdm=False)
    assert value("vllm:generation_tokens") == initial[0] + 18
    assert value("vllm:request_success") == initial[1] + 3
    assert value("vllm:num_requests_running") == 0


def test_histograms_under_vllms_names(llm: LLM) -> None:
    def histogram(name: str) -> Histogram:
        (histogram,) = [metric for metric in llm.get_metrics() if metric.name == f"vllm:{name}"]
        assert isinstance(histogram, Histogram)
        assert list(histogram.buckets)[-1] == "+Inf"
        assert sorted(histogram.buckets.values()) == list(histogram.buckets.values())
        assert histogram.buckets["+Inf"] == histogram.count
        return histogram

    names = ("e2e_request_latency_seconds", "time_to_first_token_seconds")
    names += ("inter_token_latency_seconds", "request_generation_tokens", "request_prompt_tokens")
    initial_histograms = [histogram(name) for name in names]
    outputs = llm.generate(TEXTS, GREEDY, use_tqdm=False)
    after = [histogram(name) for name in names]
    counted = [now.count - then.count for then, now in zip(initial_histograms, after, strict=True)]
    assert counted == [3, 3, 15, 3, 3]
    assert after[3].sum - initial_histograms[3].sum == 18
    prompts = sum(len(output.prompt_token_ids) for output in outputs)
    assert after[4].sum - initial_histograms[4].sum == prompts
    assert histogram("request_queue_time_seconds").count >= 3
    up_to_context = ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "+Inf"]
    for name in ("request_prompt_tokens", "request_prefill_kv_computed_tokens"):
        assert list(histogram(name).buckets) == up_to_context  # a context of 128


def test_one_priority_for_all(llm: LLM) -> None:
    chats: Any = [[{"role": "user", "content": text}] for text in TEXTS]
    assert len(llm.generate(TEXTS, GREEDY, use_tqdm=False, priority=1)) == 3
    assert len(llm.chat(chats, GREEDY, use_tqdm=False, priority=[0, 1, 2])) == 3
    for priority in ([], [1]):
        with pytest.raises(InvalidRequest) as refusal:
            llm.generate(TEXTS, GREEDY, use_tqdm=False, priority=priority)
        assert refusal.value.param == "priority"


def test_functions_reach_the_model(llm: LLM) -> None:
    (count,) = llm.apply_model(lambda model: type(model).__name__)
    assert count
    assert llm.collective_rpc(lambda executor, n: n + 1, args=(4,)) == [5]
    assert llm.collective_rpc("check_health") == [None]
    assert llm.collective_rpc(lambda executor: executor.rank) == [0]
    for name in ("no_such_thing", "_allocate", "loaded"):
        with pytest.raises(InvalidRequest) as refusal:
            llm.collective_rpc(name)
        assert refusal.value.param == "method"


def test_a_profile_is_written(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        llm.stop_profile()
    llm.start_profile(str(tmp_path / "new"))
    with pytest.raises(InvalidRequest):
        llm.start_profile()
    llm.generate("the", SamplingParams(max_tokens=2), use_tqdm=False)
    trace = json.loads(Path(llm.stop_profile()).read_text())
    assert trace["traceEvents"]


def test_engine_arguments_are_a_dataclass(folder: str) -> None:
    import dataclasses

    arguments = EngineArgs(model=folder, seed=3, swap_space=4, tensor_parallel_size=1)
    fields = dataclasses.asdict(arguments)
    assert fields["seed"] == 3
    assert LLM(**{**fields, **SMALL}).config.seed == 3
    assert arguments.create_engine_config().seed == 3
    assert "model" in inspect.signature(EngineArgs).parameters
    with pytest.raises(SystemExit):
        EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(["--config", "/nowhere.yaml"])
    assert PoolingParams() is not None
