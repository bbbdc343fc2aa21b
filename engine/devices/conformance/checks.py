"""What every device must do. A check passes, or is refused with a sentence, or fails.

A refusal is a `ConfigError` or an `InvalidRequest`: the device, or the engine for it, says what it
doesn't do before it runs anything. A wrong answer is no refusal.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import LLM, LoRARequest, SamplingParams
from engine.contract.errors import ConfigError
from engine.contract.sampling_params import StructuredOutputsParams
from engine.devices.conformance.models import (
    FAMILIES,
    VOCAB,
    TinyModel,
    merge_adapter,
    prompts,
    write_adapter,
)
from engine.devices.device import CONTRACT_VERSION
from engine.devices.registry import device_class

OUTPUT = 8
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
#: Absolute tolerance of log probabilities: float32's rounding through a few layers.
TOLERANCE = 1e-3


class ConformanceError(Exception):
    """A device did something else than it must."""


def expect(condition: bool, sentence: str) -> None:
    """Raise `ConformanceError` unless the condition holds."""
    if not condition:
        raise ConformanceError(sentence)


@dataclass(frozen=True, slots=True)
class Check:
    """`run` raises `ConformanceError` where it fails; its value is a figure to print, or ""."""

    name: str
    run: Callable[[Bench], str | None]


class Bench:
    """Models in `folder`, run on the device of a name."""

    def __init__(self, device: str, folder: Path) -> None:
        self.device = device
        self._folder = folder
        self._models: dict[str, TinyModel] = {}
        self._expected: dict[str, list[list[int]]] = {}

    def model(self, family: str) -> TinyModel:
        if family not in self._models:
            self._models[family] = TinyModel(family, self._folder / family)
        return self._models[family]

    def expected(self, family: str) -> list[list[int]]:
        """The output of `transformers` for `prompts()`."""
        if family not in self._expected:
            model = self.model(family)
            self._expected[family] = [model.greedy(prompt, OUTPUT) for prompt in prompts()]
        return self._expected[family]

    @contextmanager
    def llm(self, family: str, **settings: Any) -> Iterator[LLM]:
        """An engine on the device; its books are checked at the end."""
        defaults = {"num_gpu_blocks_override": 200, "max_model_len": 256, "dtype": "float32"}
        folder = str(self.model(family).folder)
        llm = LLM(folder, device=self.device, **{**defaults, **settings})
        try:
            yield llm
            llm.core.check_integrity()
        finally:
            llm.core.shutdown()


def tokens(llm: LLM, asked: list[list[int]], params: Any = GREEDY, **more: Any) -> list[list[int]]:
    """The output of an engine."""
    outputs = llm.generate(asked, params, use_tqdm=False, **more)
    return [list(output.outputs[0].token_ids) for output in outputs]


def compare(answers: list[list[int]], expected: list[list[int]], what: str) -> None:
    """Raise `ConformanceError`, with the first difference, unless they are equal."""
    for number, (ours, theirs) in enumerate(zip(answers, expected, strict=True)):
        expect(ours == theirs, f"prompt {number}: {ours} instead of {theirs}, {what}")


# Checks of every family.


def _together(bench: Bench, family: str) -> None:
    with bench.llm(family) as llm:
        compare(tokens(llm, prompts()), bench.expected(family), "which is transformers'")


def _one_at_a_time(bench: Bench, family: str) -> None:
    with bench.llm(family, enable_prefix_caching=False) as llm:
        answers = [tokens(llm, [prompt])[0] for prompt in prompts()]
        compare(answers, bench.expected(family), "one request at a time")


def _chunked(bench: Bench, family: str) -> None:
    with bench.llm(family, max_num_batched_tokens=16) as llm:
        compare(tokens(llm, prompts()), bench.expected(family), "in chunks of 16 tokens")


def _cached(bench: Bench, family: str) -> None:
    with bench.llm(family) as llm:
        if not llm.core.capacity.caches_prefixes:
            raise ConfigError(f"The device {bench.device} caches no prefixes.", param="device")
        tokens(llm, prompts())
        outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        compare(answers, bench.expected(family), "with a cached prefix")
        cached = sum(output.num_cached_tokens or 0 for output in outputs)
        expect(cached > 0, "no token came from the prefix cache")


def _preempted(bench: Bench, family: str) -> None:
    block_size = device_class(bench.device).block_size or 4
    # Blocks for the longest prompt, and a few more. A model with two KV cache groups needs two
    # blocks for the same tokens.
    num_blocks = -(-100 // block_size) + 5
    settings = {
        "num_gpu_blocks_override": 2 * num_blocks if family == "gemma2" else num_blocks,
        "block_size": block_size,
        "max_num_batched_tokens": 64,
        "enable_prefix_caching": False,
    }
    with bench.llm(family, **settings) as llm:
        compare(tokens(llm, prompts()), bench.expected(family), "with too few blocks for all")
        expect(llm.core.scheduler.num_preemptions > 0, "nothing was preempted")


def _logprobs(bench: Bench, family: str) -> None:
    params = GREEDY.clone()
    params.logprobs = 0
    with bench.llm(family) as llm:
        outputs = llm.generate(prompts(), params, use_tqdm=False)
    for prompt, output in zip(prompts(), outputs, strict=True):
        answer = output.outputs[0]
        ids = list(answer.token_ids)
        ours = [row[token].logprob for row, token in zip(answer.logprobs or [], ids, strict=True)]
        theirs = bench.model(family).logprobs(prompt + ids, len(ids))
        worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        expect(worst <= TOLERANCE, f"a log probability is {worst:.1e} away from transformers'")


OF_FAMILIES: dict[str, Callable[[Bench, str], None]] = {
    "tokens equal transformers'": _together,
    "alone as in a batch": _one_at_a_time,
    "in chunks of 16 tokens": _chunked,
    "with a cached prefix": _cached,
    "preempted": _preempted,
    "log probabilities": _logprobs,
}


# Checks of one model.


def _llama(bench: Bench, what: str, params: Any = GREEDY, **settings: Any) -> None:
    """The Llama's tokens are `transformers`' with these settings too."""
    with bench.llm("llama", **settings) as llm:
        compare(tokens(llm, prompts(), params), bench.expected("llama"), what)


def _contract(bench: Bench) -> str:
    device = device_class(bench.device)
    expect(device.name == bench.device, f"its name is {device.name!r}, not {bench.device!r}")
    reason = device.unavailable_reason()
    expect(reason == "", f"it can't be used here: {reason}")
    return f"version {CONTRACT_VERSION}"


def _seeded(bench: Bench) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=OUTPUT, ignore_eos=True)
    with bench.llm("llama") as llm:
        first = tokens(llm, prompts(), params)
        isolated_answers = [tokens(llm, [prompt], params)[0] for prompt in prompts()]
    compare(isolated_answers, first, "with the same seed in a batch")


def _several_outputs(bench: Bench) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=OUTPUT, ignore_eos=True)
    with bench.llm("llama") as llm:
        (first,), (second,) = (llm.generate([prompts()[5]], params, use_tqdm=False) for _ in "12")
    texts = [list(output.token_ids) for output in first.outputs]
    expect(len({tuple(text) for text in texts}) > 1, "all outputs are equal")
    compare([list(output.token_ids) for output in second.outputs], texts, "the second time")


def _stops(bench: Bench) -> None:
    expected = bench.expected("llama")[3]
    stop = expected[3]
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, stop_token_ids=[stop])
    with bench.llm("llama") as llm:
        (answer,) = tokens(llm, [prompts()[3]], params)
    compare([answer], [expected[: expected.index(stop) + 1]], "up to a stop token")


def _bans(bench: Bench) -> None:
    banned = bench.expected("llama")[3][0]
    params = SamplingParams(
        temperature=0, max_tokens=OUTPUT, ignore_eos=True, logit_bias={banned: -100}
    )
    with bench.llm("llama") as llm:
        (answer,) = tokens(llm, [prompts()[3]], params)
    expect(banned not in answer, "a token with a bias of -100 was chosen")


def _penalties(bench: Bench) -> None:
    params = SamplingParams(
        temperature=0,
        max_tokens=OUTPUT,
        ignore_eos=True,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=0.3,
    )
    with bench.llm("llama") as llm:
        together = tokens(llm, prompts(), params)
        isolated_answers = [tokens(llm, [prompt], params)[0] for prompt in prompts()]
    compare(isolated_answers, together, "with penalties in a batch")


def _grammar(bench: Bench) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    params = SamplingParams(
        temperature=0,
        max_tokens=120,
        structured_outputs=StructuredOutputsParams(json=json.dumps(schema)),
    )
    with bench.llm("llama") as llm:
        (output,) = llm.generate([prompts()[3]], params, use_tqdm=False)
    value = json.loads(output.outputs[0].text)
    expect(isinstance(value["a"], int), f"{value} doesn't follow the schema")


def _resumed(bench: Bench) -> None:
    with bench.llm("llama") as llm:
        half = OUTPUT // 2
        asked = [
            prompt + answer[:half]
            for prompt, answer in zip(prompts(), bench.expected("llama"), strict=True)
        ]
        answers = tokens(
            llm, asked, SamplingParams(temperature=0, max_tokens=half, ignore_eos=True)
        )
    compare(
        answers, [answer[half:] for answer in bench.expected("llama")], "from half of the answer"
    )


def _sleep(bench: Bench) -> None:
    with bench.llm("llama", enable_sleep_mode=True) as llm:
        tokens(llm, prompts())
        llm.sleep(1)
        llm.wake_up()
        compare(tokens(llm, prompts()), bench.expected("llama"), "after sleep")


def _adapter(bench: Bench) -> None:
    with bench.llm("llama", enable_lora=True, max_lora_rank=8) as llm:
        merged = TinyModel("llama", bench.model("llama").folder.parent / "merged")
        folder = merged.folder.parent / "adapter"
        write_adapter(folder, merged)
        merge_adapter(merged, folder)
        request = LoRARequest("adapter", 1, str(folder))
        answers = tokens(llm, prompts(), lora_request=request)
        compare(answers, [merged.greedy(prompt, OUTPUT) for prompt in prompts()], "merged weights'")
        compare(tokens(llm, prompts()), bench.expected("llama"), "without the adapter")


def _abort(bench: Bench) -> None:
    with bench.llm("llama") as llm:
        engine = llm.llm_engine
        for number, prompt in enumerate(prompts()):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, GREEDY)
        engine.step()
        engine.abort_request([str(number) for number in range(len(prompts()))])
        while engine.has_unfinished_requests():
            engine.step()
        pool = llm.core.scheduler.kv.pool
        expect(pool.num_free_blocks == pool.num_blocks, "blocks of aborted requests are in use")


def _long(bench: Bench) -> None:
    prompt = [4 + index % (VOCAB - 4) for index in range(255)]
    with bench.llm("llama", max_num_batched_tokens=64) as llm:
        (answer,) = tokens(llm, [prompt])
    compare([answer], [bench.model("llama").greedy(prompt, 1)], "at the full context")


def _too_long(bench: Bench) -> None:
    with bench.llm("llama") as llm:
        try:
            tokens(llm, [[4] * 257])
        except ValueError:
            compare(tokens(llm, prompts()[:1]), bench.expected("llama")[:1], "after a refusal")
        else:
            raise ConformanceError("a prompt longer than the context was taken")


def _cache_dtype(bench: Bench, dtype: str) -> None:
    with bench.llm("llama", kv_cache_dtype=dtype) as llm:
        answers = tokens(llm, prompts())
        isolated_answers = [tokens(llm, [prompt])[0] for prompt in prompts()[:4]]
    compare(isolated_answers, answers[:4], "in a batch")
    if dtype == "float32":
        compare(answers, bench.expected("llama"), "which is transformers'")


def _unknown_cache_dtype(bench: Bench) -> None:
    supported = device_class(bench.device).kv_cache_dtypes
    candidates = ("int8", "fp8_e5m2", "fp8", "bfloat16", "fp4")  # the last one no device has
    other = next(name for name in candidates if name not in supported)
    try:
        with bench.llm("llama", kv_cache_dtype=other):
            pass
    except ConfigError as error:
        expect(error.param == "kv_cache_dtype", f"the error names {error.param}")
    else:
        raise ConformanceError(f"{other} was taken, which kv_cache_dtypes doesn't name")


def _threads_end(bench: Bench) -> None:
    previous = set(threading.enumerate())
    with bench.llm("llama") as llm:
        tokens(llm, prompts()[:1])
    deadline = time.monotonic() + 60
    while (remaining := set(threading.enumerate()) - previous) and time.monotonic() < deadline:
        time.sleep(0.05)
    expect(not remaining, f"threads are left: {sorted(thread.name for thread in remaining)}")


def _two_engines(bench: Bench) -> None:
    with bench.llm("llama") as one, bench.llm("qwen3") as other:
        compare(tokens(one, prompts()), bench.expected("llama"), "beside another model")
        compare(tokens(other, prompts()), bench.expected("qwen3"), "beside another model")


def _overhead(bench: Bench) -> str:
    """A step's time for a model in which there is next to nothing to compute."""
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    with bench.llm("llama") as llm:
        tokens(llm, prompts()[:8], params)
        steps, started = llm.core.stats.steps_total, time.perf_counter()
        tokens(llm, prompts()[:8], params)
        elapsed = time.perf_counter() - started
        steps = llm.core.stats.steps_total - steps
    return f"{elapsed / steps * 1e3:.2f} ms a step of 8 rows"


OF_ONE_MODEL: dict[str, Callable[[Bench], str | None]] = {
    "contract": _contract,
    "seeded samples alone as in a batch": _seeded,
    "several outputs": _several_outputs,
    "stop tokens": _stops,
    "logit bias": _bans,
    "penalties": _penalties,
    "JSON schema": _grammar,
    "resumed from half of an answer": _resumed,
    "sleep": _sleep,
    "adapters": _adapter,
    "n-gram drafts": lambda bench: _llama(
        bench,
        "with drafts",
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
    ),
    "planned ahead": lambda bench: _llama(bench, "planned ahead", async_scheduling=True),
    "not planned ahead": lambda bench: _llama(bench, "one after the other", async_scheduling=False),
    "blocks of 32 tokens": lambda bench: _llama(bench, "in blocks of 32", block_size=32),
    "more requests than rows": lambda bench: _llama(bench, "by four rows", max_num_seqs=4),
    "without a prefix cache": lambda bench: _llama(
        bench, "without prefix caching", enable_prefix_caching=False
    ),
    "aborts": _abort,
    "a prompt of the full context": _long,
    "a prompt that is too long": _too_long,
    "another KV cache's dtype is refused": _unknown_cache_dtype,
    "threads end": _threads_end,
    "two models in one process": _two_engines,
    "overhead": _overhead,
}


def all_checks(device: str) -> list[Check]:
    """Every check of the device of a name. Raises `ConfigError` for one that isn't there."""
    dtypes = device_class(device).kv_cache_dtypes

    def of(family: str, run: Callable[[Bench, str], None]) -> Callable[[Bench], None]:
        return lambda bench: run(bench, family)

    return [
        *(Check(name, run) for name, run in OF_ONE_MODEL.items()),
        *(Check(f"KV cache of {dtype}", of(dtype, _cache_dtype)) for dtype in dtypes),
        *(
            Check(f"{family}: {name}", of(family, run))
            for family in FAMILIES
            for name, run in OF_FAMILIES.items()
        ),
    ]
