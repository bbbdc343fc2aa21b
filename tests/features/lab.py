"""Runs the same requests with any set of features: engines by their settings, and what befalls
them meanwhile.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from engine.contract.engine_config import EngineConfig
from engine.contract.messages import EngineRequest, TokenDelta
from engine.contract.sampling_params import SamplingParams
from engine.core.engine_core import EngineCore
from tests.features.checkpoints import Checkpoints
from tests.features.guesses import Guesses
from tests.features.workload import LENGTHS, NUM_STATES, Features, Output, Outputs, request

BLOCK, MAX_LEN = 4, 256
BLOCKS = 600
#: What a feature sets.
SETTINGS: dict[str, dict[str, Any]] = {
    "prefix cache": {"enable_prefix_caching": True},
    "chunks": {"max_num_batched_tokens": 24},
    "quantized weights": {"quantization": "int8"},
    "narrow caches": {"kv_cache_dtype": "int8"},
    "bridge": {"model_impl": "transformers"},
    "pooling": {"runner": "pooling"},
    "sleep": {"enable_sleep_mode": True},
    "tier": {"enable_prefix_caching": True, "kv_offloading_size": 0.1, "swap_space": 0.1},
    "disaggregated": {"enable_prefix_caching": True, "kv_offloading_size": 0.1},
    "async scheduling": {"async_scheduling": True},
    "speculation": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5}},
    "ranks": {"tensor_parallel_size": 2},
}
#: Number of the engine that computes prompts for the others.
PREFILL = 9
#: Tokens that all have together when something befalls them.
SLEEPS_AT, KILLED_AT = 20, 45
_PREEMPTING = (0.8, 0.6, 0.45, 0.3)


class Died(Exception):
    """A request ended with an error."""


@dataclass(slots=True)
class Run:
    """What came of a run.

    Attributes:
        cores: the engines, in the order in which they were used.
        resumed: requests that went on in another engine, with tokens or before the first.
        slept: requests that were under way when the engine slept.
        all_preempted: all blocks were taken from all sequences once.
        loaded: tokens whose blocks came from a tier.
        max_blocks: in use at a time, of the pool that was used most.
    """

    features: Features
    cores: list[EngineCore]
    outputs: Outputs = field(default_factory=dict)
    resumed: list[str] = field(default_factory=list)
    slept: list[str] = field(default_factory=list)
    max_blocks: int = 0
    all_preempted: bool = False
    num_preemptions: int = 0
    hits: int = 0
    loaded: int = 0

    @property
    def num_tokens(self) -> int:
        """That all outputs have together."""
        return sum(len(output.tokens) for output in self.outputs.values())

    def add(self, delta: TokenDelta) -> None:
        """A delta of one of its requests. Raises `Died`."""
        if delta.error is not None:
            raise Died(delta.error.message)
        number = int(delta.request_id.rpartition("-")[2])
        self.outputs.setdefault((number, delta.index), Output()).add(delta)


class Lab:
    """Engines and results are made once.

    Args:
        folder: for checkpoints.
    """

    def __init__(self, folder: Path, guesses: Guesses) -> None:
        self.checkpoints = Checkpoints(folder)
        self._tier = str(folder / "tier")
        self._guesses = guesses
        self._ids = itertools.count()
        self._cores: dict[str, EngineCore] = {}
        self.result = functools.cache(self._result)
        self.run_isolated = functools.cache(self._run_isolated)

    # -- engines ------------------------------------------------------------------------------

    def kind(self, features: Features) -> str:
        """Which checkpoint a run is with."""
        if "states" in features:
            return "recurrent_gemma" if "windows" in features else "lfm2"
        if "pictures" in features:
            return "llava"
        if "videos" in features:
            return "qwen2-vl"
        if "speech" in features:
            return "whisper"
        if "encoded texts" in features:
            return "mbart"
        return "qwen2-window" if "windows" in features else "llama"

    def core(self, features: Features, number: int = 0, **changes: Any) -> EngineCore:
        """The engine of these features; another `number` is another replica."""
        settings: dict[str, Any] = {
            "model": str(self.checkpoints.unquantized(self.kind(features))), "dtype": "float32",
            "served_model_name": "tiny", "max_model_len": MAX_LEN, "block_size": BLOCK,
            "num_gpu_blocks_override": BLOCKS, "enable_prefix_caching": False, "num_threads": 1,
            "max_num_seqs": 10,
        }  # fmt: skip
        for feature in sorted(features & SETTINGS.keys()):
            settings |= SETTINGS[feature]
        if "draft model" in features:
            draft = str(self.checkpoints.draft(self.kind(features)))
            settings |= {"speculative_config": {"model": draft, "num_speculative_tokens": 4}}
        if "heads" in features:
            # With an encoder they are refused, so that any will do.
            encodes = features & {"speech", "encoded texts"}
            kind = "llama" if encodes else self.kind(features)
            head = str(self.checkpoints.head(kind, self._plain_texts))
            config = {"method": "eagle", "model": head, "num_speculative_tokens": 4}
            settings |= {"speculative_config": config}
        if "disaggregated" in features:
            role = "kv_producer" if number == PREFILL else "kv_consumer"
            settings |= {"kv_transfer_config": {"kv_role": role}}
            settings |= {"kv_offloading_backend": self._tier}
            if features & {"pictures", "videos"}:
                role = "ec_producer" if number == PREFILL else "ec_consumer"
                settings |= {"ec_transfer_config": {"ec_role": role}}
        settings |= changes
        key = json.dumps([settings, number], sort_keys=True)
        if key not in self._cores:
            self._cores[key] = EngineCore(EngineConfig(**settings))
            gc.freeze()  # an engine that sleeps collects what it can, again and again
        return self._cores[key]

    def end_ranks(self) -> None:
        """End the processes of all engines with ranks, which are made anew where they're needed."""
        for key, core in list(self._cores.items()):
            if core.config.tensor_parallel_size > 1:
                core.shutdown()
                del self._cores[key]

    def _plain_texts(self, kind: str) -> list[list[int]]:
        """What a checkpoint's model says without any other feature, behind the prompts."""
        of_kind = {"qwen2-window": {"windows"}, "llava": {"pictures"}, "qwen2-vl": {"videos"}}
        features: Features = frozenset(of_kind.get(kind, ()))
        prompts = {
            int(request.request_id.rpartition("-")[2]): request
            for request in self.requests(features)
        }
        return [
            [*prompts[number].prompt_token_ids, *output.tokens]
            for (number, _), output in self.result(features).outputs.items()
        ]

    # -- runs ---------------------------------------------------------------------------------

    def _result(self, features: Features) -> Run:
        """All requests with these features. Raises `QuireError` where the product refuses them."""
        if "preemption" not in features:
            return self.run(features)
        if "pooling" in features:  # prompts don't grow: it takes an operator, and chunks
            return self.run(features, max_num_batched_tokens=24)
        max_blocks = self.result(features - {"preemption"}).max_blocks
        needed = max(_max_tokens_of(request) for request in self.requests(features)) // BLOCK + 2
        if "speech" in features:
            needed += NUM_STATES // BLOCK + 1
        if "encoded texts" in features:
            needed += MAX_LEN // BLOCK
        for part in _PREEMPTING:
            run = self.run(features, num_gpu_blocks_override=max(needed, int(part * max_blocks)))
            if run.num_preemptions:
                break
        return run

    def run(
        self, features: Features, requests: list[EngineRequest] | None = None, **changes: Any
    ) -> Run:
        """Those requests, or the workload's, with what befalls the features' engines."""
        replicas = 2 if features & {"failover", "several replicas"} else 1
        cores = [self.core(features, number, **changes) for number in range(replicas)]
        if "speculation" in features:
            self._guesses.know(self.result(features - {"speculation"}).outputs)
        for core in cores:
            if "disaggregated" in features:  # what others have saved stays of use
                core.scheduler.kv.pool.reset_prefix_cache()
            else:
                core.reset_prefix_cache()
        requests = requests or self.requests(features)
        if "disaggregated" in features:
            requests = _prefilled(self.core(features, PREFILL, **changes), requests)
        for number in range(2 if features & {"prefix cache", "tier", "disaggregated"} else 1):
            if number and features & {"tier", "disaggregated"}:
                for core in cores:
                    core.scheduler.kv.pool.reset_prefix_cache()
            run = self._once(features, cores, requests)
        for core in cores:
            core.check_integrity()
            assert core.scheduler.kv.pool.num_free_blocks == core.scheduler.kv.pool.num_blocks
        return run

    def _run_isolated(self, features: Features, number: int) -> Run:
        """One of the workload's requests, with nobody beside it."""
        return self.run(features, [self.requests(features)[number]])

    def requests(self, features: Features) -> list[EngineRequest]:
        """The workload."""
        has_adapters = "adapters" in features
        adapter = self.checkpoints.adapter(self.kind(features)) if has_adapters else None
        return [request(number, features, adapter) for number in range(len(LENGTHS))]

    def _once(
        self, features: Features, cores: list[EngineCore], requests: list[EngineRequest]
    ) -> Run:
        """The requests, once."""
        attempt = next(self._ids)
        asked = [
            msgspec.structs.replace(request, request_id=f"{attempt}.{request.request_id}")
            for request in requests
        ]
        run = Run(features, cores)
        initial_num_preemptions = [core.scheduler.num_preemptions for core in cores]
        hits = sum(_hits(core) for core in cores)
        loaded = sum(_loaded(core) for core in cores)
        several = "several replicas" in features
        for index, item in enumerate(asked):
            # In pairs, so that both replicas get some of those with a feature of their own.
            cores[index // 2 % len(cores) if several else 0].add_request(item)
        for _ in self._steps(run, cores):
            if {"preemption", "pooling"} <= features and not run.all_preempted and run.max_blocks:
                run.all_preempted = True
                cores[0].scheduler.preempt_all()
            if "sleep" in features and not run.slept and self._due(run, SLEEPS_AT):
                self._sleep(run, cores[0])
            if "failover" in features and not run.resumed and self._due(run, KILLED_AT):
                self._kill(run, asked)
        run.num_preemptions = sum(
            core.scheduler.num_preemptions - was
            for core, was in zip(cores, initial_num_preemptions, strict=True)
        )
        run.hits = sum(_hits(core) for core in cores) - hits
        run.loaded = sum(_loaded(core) for core in cores) - loaded
        return run

    def _steps(self, run: Run, cores: list[EngineCore]) -> Iterator[None]:
        """Before each step of all engines."""
        while any(core.has_work for core in cores):
            yield
            for core in cores:
                if core.has_work:
                    for delta in core.step():
                        run.add(delta)
                    pool = core.scheduler.kv.pool
                    run.max_blocks = max(run.max_blocks, pool.num_blocks - pool.num_free_blocks)

    def _due(self, run: Run, tokens: int) -> bool:
        """Whether it's time; vectors come without tokens before them."""
        return run.num_tokens >= tokens or "pooling" in run.features or "beams" in run.features

    def _sleep(self, run: Run, core: EngineCore) -> None:
        run.slept = [*core.requests]
        for delta in core.sleep(1):
            run.add(delta)
        core.wake_up()

    def _kill(self, run: Run, asked: list[EngineRequest]) -> None:
        """The first engine is gone; the other goes on with what clients have."""
        first, second = run.cores
        for engine_request in asked:
            if engine_request.request_id in first.requests:
                first.abort(engine_request.request_id)
                second.add_request(self._rest(run, engine_request))
                run.resumed.append(engine_request.request_id)

    def _rest(self, run: Run, asked: EngineRequest) -> EngineRequest:
        """As a gateway asks for it: the prompt and the tokens so far."""
        number = int(asked.request_id.rpartition("-")[2])
        count = 1 if asked.sampling.use_beam_search else asked.sampling.num_sequences
        had = [run.outputs.get((number, index), Output()) for index in range(count)]
        if not any(output.tokens for output in had):
            return asked
        return msgspec.structs.replace(
            asked,
            resume_token_ids=[list(output.tokens) for output in had],
            skip_indices=[index for index, output in enumerate(had) if output.finish_reason],
        )


def _prefilled(core: EngineCore, requests: list[EngineRequest]) -> list[EngineRequest]:
    """The requests, once an engine has computed and saved their prompts, those with pictures up to
    the last, as gateways ask for it.
    """
    sampling = SamplingParams(max_tokens=1, temperature=0)
    for asked in requests:
        prompt, pictures = asked.prompt_token_ids, asked.media
        if core.config.ec_transfer_config and pictures:
            prompt = prompt[: max(item.end for item in pictures)]
        core.add_request(
            msgspec.structs.replace(
                asked, prompt_token_ids=prompt, sampling=sampling, token_cap=None
            )
        )
    while core.has_work:
        core.step()
    assert core.scheduler.kv_connector is not None
    core.scheduler.kv_connector.wait_until_saved(60)
    return [msgspec.structs.replace(asked, prefilled=True) for asked in requests]


def _max_tokens_of(asked: EngineRequest) -> int:
    """Of one of its sequences."""
    output = 0 if asked.pooling is not None else asked.sampling.max_tokens or 0
    return len(asked.prompt_token_ids) + output


def _loaded(core: EngineCore) -> int:
    return core.snapshot().external_prefix_cache_hits_total


def _hits(core: EngineCore) -> int:
    """Prompt tokens that were found in the prefix cache so far."""
    return core.snapshot().prefix_cache_hits_total
