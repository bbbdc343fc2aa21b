"""Two engines for each part, one with it and one without, that take turns."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TextIO

from benchmarks.offline import run_jobs
from benchmarks.statistics import mean, percentile
from benchmarks.workload import Job, random_jobs
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError, QuireError
from engine.core.engine_core import EngineCore
from engine.core.warmup import warm_up
from engine.executor.uniproc_executor import unwrap_uniproc

# -- What the two engines of an ablation are given to do, and the figure that is compared.


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much there is to do.

    Attributes:
        prompts: requests of loads with several.
        output_len: tokens that a single stream generates.
        context: tokens of the long prompt of "long", if the model takes so many.
    """

    prompts: int = 24
    output_len: int = 32
    context: int = 3584


class Load(NamedTuple):
    """One kind of work.

    Attributes:
        what: in words.
        unit: of its figure.
        run: does it, with fresh prompts for each seed, and gives the figure.
        less_is_better: of the figure.
    """

    what: str
    unit: str
    run: Callable[[EngineCore, Sizes, int], float]
    less_is_better: bool = False

    def gain(self, with_: float, without: float) -> float:
        """How many times as good the figure is with a part."""
        return without / with_ if self.less_is_better else with_ / without


_SHORT = (8, 8)
_SHARED_TOKENS = 512
_PROMPT_TOKENS = 512
_BURST_TOKENS = (16, 1024)
_STREAMS = 8
_REST_S = 1.0


def _jobs(
    core: EngineCore, count: int, prompt: tuple[int, int], output: tuple[int, int], seed: int
) -> list[Job]:
    room = core.facts.max_model_len - max(output)
    prompt = min(prompt[0], room), min(prompt[1], room)
    return random_jobs(count, core.facts.vocab_size, prompt, output, seed)


def _decode_rate(
    core: EngineCore, jobs: list[Job], temperature: float = 0, top_p: float = 1
) -> float:
    """Tokens a second of one stream while it decodes."""
    found = run_jobs(core, jobs, temperature=temperature, top_p=top_p)
    return 1 / percentile(found["itl"], 50)


def _one(core: EngineCore, sizes: Sizes, seed: int) -> float:
    return _decode_rate(core, _jobs(core, 1, _SHORT, (sizes.output_len,) * 2, seed))


def _eight(core: EngineCore, sizes: Sizes, seed: int) -> float:
    jobs = _jobs(core, _STREAMS, _SHORT, (sizes.output_len,) * 2, seed)
    return _STREAMS * _decode_rate(core, jobs)


def _sampled(core: EngineCore, sizes: Sizes, seed: int) -> float:
    jobs = _jobs(core, 1, _SHORT, (sizes.output_len,) * 2, seed)
    return _decode_rate(core, jobs, temperature=0.8, top_p=0.9)


def _long(core: EngineCore, sizes: Sizes, seed: int) -> float:
    # The same prompt each time: what it costs to compute is not the question.
    return _decode_rate(core, _jobs(core, 1, (sizes.context,) * 2, (sizes.output_len,) * 2, 0))


def _many(core: EngineCore, sizes: Sizes, seed: int) -> float:
    jobs = _jobs(core, sizes.prompts, (128, 512), (64, 128), seed)
    core.reset_prefix_cache()
    return sum(job.output_tokens for job in jobs) / float(run_jobs(core, jobs)["seconds"])


def _prompt(core: EngineCore, sizes: Sizes, seed: int) -> float:
    jobs = _jobs(core, 1, (_PROMPT_TOKENS,) * 2, (1, 1), seed)
    core.reset_prefix_cache()
    return float(run_jobs(core, jobs)["seconds"]) * 1000


def _shared(core: EngineCore, sizes: Sizes, seed: int) -> float:
    start, *ends = _jobs(core, sizes.prompts + 1, (_SHARED_TOKENS,) * 2, (8, 8), seed)
    cut = len(start.prompt_token_ids) * 7 // 8
    jobs = [
        Job(start.prompt_token_ids[:cut] + end.prompt_token_ids[cut:], end.output_tokens)
        for end in ends
    ]
    core.reset_prefix_cache()
    return len(jobs) / float(run_jobs(core, jobs, at_once=_STREAMS)["seconds"])


def _streams(core: EngineCore, sizes: Sizes, seed: int) -> dict[str, Any]:
    """Some streams, and others that follow as they end."""
    jobs = _jobs(core, sizes.prompts, (128, 512), (64, 128), seed)
    core.reset_prefix_cache()
    return run_jobs(core, jobs, at_once=_STREAMS)


def _beside(core: EngineCore, sizes: Sizes, seed: int) -> float:
    return percentile(_streams(core, sizes, seed)["itl"], 99) * 1000


def _first(core: EngineCore, sizes: Sizes, seed: int) -> float:
    return percentile(_streams(core, sizes, seed)["ttft"], 50) * 1000


def _rested(core: EngineCore, sizes: Sizes, seed: int) -> float:
    # Blocks that were never used go first: as long as there are some, each turn comes to new pages.
    time.sleep(_REST_S)
    return max(_streams(core, sizes, seed)["steps"]) * 1000


def _burst(core: EngineCore, sizes: Sizes, seed: int) -> list[float]:
    """When the first tokens came, in seconds."""
    jobs = _jobs(core, sizes.prompts, _BURST_TOKENS, (8, 8), seed)
    core.reset_prefix_cache()
    return list(run_jobs(core, jobs)["ttft"])


def _burst_median(core: EngineCore, sizes: Sizes, seed: int) -> float:
    return percentile(_burst(core, sizes, seed), 50) * 1000


def _burst_mean(core: EngineCore, sizes: Sizes, seed: int) -> float:
    return mean(_burst(core, sizes, seed)) * 1000


LOADS = {
    "one": Load("one stream, short prompt, greedy", "tok/s", _one),
    "eight": Load(f"{_STREAMS} streams, short prompts, greedy", "tok/s", _eight),
    "sampled": Load("one stream, temperature 0.8, top_p 0.9", "tok/s", _sampled),
    "long": Load("one stream behind a long prompt", "tok/s", _long),
    "many": Load("many requests at once, output tokens", "tok/s", _many),
    "prompt": Load(f"a prompt of {_PROMPT_TOKENS} tokens", "ms", _prompt, less_is_better=True),
    "shared": Load("requests whose prompts begin alike", "requests/s", _shared),
    "beside": Load(
        f"{_STREAMS} streams that others follow, gaps between tokens, p99",
        "ms",
        _beside,
        less_is_better=True,
    ),
    "first": Load(
        f"{_STREAMS} streams that others follow, first tokens, median",
        "ms",
        _first,
        less_is_better=True,
    ),
    "rested": Load(
        f"{_STREAMS} streams after a second's rest, on blocks that nobody has used, longest step",
        "ms",
        _rested,
        less_is_better=True,
    ),
    "burst": Load(
        f"prompts of {_BURST_TOKENS[0]} to {_BURST_TOKENS[1]} tokens at once, first tokens, median",
        "ms",
        _burst_median,
        less_is_better=True,
    ),
    "burst-mean": Load(
        "such a burst, first tokens, mean",
        "ms",
        _burst_mean,
        less_is_better=True,
    ),
}


# -- The optimisations of a CPU, each with the switch that turns it off. Torch-free.


@dataclass(frozen=True, slots=True)
class Facts:
    """What an engine says of itself.

    Attributes:
        kernels: name of its kernels.
        dtype: of its weights.
        quantization: of its weights.
        experts: whether the model has any.
    """

    kernels: str
    dtype: str
    quantization: str | None
    experts: bool

    @property
    def compiled(self) -> bool:
        """Whether the compiled CPU kernels run it."""
        return self.kernels.startswith("cpu-")


def _anywhere(facts: Facts) -> str:
    return ""


def _compiled(facts: Facts) -> str:
    return "" if facts.compiled else f"{facts.kernels} kernels run this model"


def _with_experts(facts: Facts) -> str:
    return _compiled(facts) or ("" if facts.experts else "the model has no experts")


def _on_avx512(facts: Facts) -> str:
    wide = facts.kernels.startswith("cpu-avx512")
    return "" if wide else f"{facts.kernels} kernels have nothing wider to turn off"


def _with_pairs(facts: Facts) -> str:
    plain = facts.dtype == "bfloat16" and facts.quantization is None
    if not plain:
        return "the weights aren't bfloat16 (--dtype bfloat16)"
    return "" if facts.kernels == "cpu-avx512" else f"{facts.kernels} kernels never round them"


def _with_integers(facts: Facts) -> str:
    if facts.quantization is None and facts.dtype != "bfloat16":
        return "the weights are neither bfloat16 nor quantised"
    return "" if facts.kernels == "cpu-avx512" else f"{facts.kernels} kernels don't use them"


@dataclass(frozen=True, slots=True)
class Part:
    """An optimisation.

    Attributes:
        what: in words.
        switch: how a user turns it off, or on where it's off by itself.
        loads: those that show it.
        with_, without: engine settings, over those that the user gave.
        environment: variables of the engine without it.
        refuses: why it can't be shown with an engine; "": it can.
    """

    what: str
    switch: str
    loads: tuple[str, ...]
    with_: Mapping[str, Any] = field(default_factory=dict)
    without: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    refuses: Callable[[Facts], str] = _anywhere


def _flag(
    name: str,
    what: str,
    *loads: str,
    refuses: Callable[[Facts], str] = _anywhere,
) -> Part:
    """A setting that is on by default."""
    return Part(
        what, f"--no-{name.replace('_', '-')}", loads, without={name: False}, refuses=refuses
    )


def _switch(name: str, what: str, *loads: str, refuses: Callable[[Facts], str] = _compiled) -> Part:
    """One of `kernels.ablations.NAMES`, and of `PARTS`."""
    variable = "QUIRE_ABLATIONS"
    return Part(what, f"{variable}={name}", loads, environment={variable: name}, refuses=refuses)


def _isa(isa: str, what: str, *loads: str, refuses: Callable[[Facts], str]) -> Part:
    name = "QUIRE_CPU_ISA"
    return Part(what, f"{name}={isa}", loads, environment={name: isa}, refuses=refuses)


def _rounded(bits: int, *loads: str) -> Part:
    name = f"int{bits}"
    return Part(
        f"{bits}-bit weights",
        f"--quantization {name}",
        loads,
        with_={"quantization": name},
        without={"quantization": None},
    )


PARTS: dict[str, Part] = {
    "kernels": _flag(
        "cpu_kernels", "compiled CPU kernels, beside plain torch", "one", refuses=_compiled
    ),
    "avx512": _isa("avx2", "AVX-512, beside AVX2", "one", "many", refuses=_on_avx512),
    "vnni-bf16": _isa(
        "avx512_core",
        "instructions for 8-bit and bfloat16 products",
        "one",
        "many",
        refuses=_with_integers,
    ),
    "decoder": _switch("decoder", "all layers in one call", "one"),
    "step": _switch("step", "a whole decode step in one call", "one", "eight"),
    "experts": _switch(
        "experts", "experts in one call, and all layers with them", "one", "many",
        refuses=_with_experts,
    ),
    "sampling": _switch("sampling", "tokens chosen by the kernels", "one", "sampled"),
    "rounding": _flag(
        "round_activations",
        "activations rounded to bfloat16 beside such weights",
        "one",
        "many",
        refuses=_with_pairs,
    ),
    "int8": _rounded(8, "one", "many"),
    "int4": _rounded(4, "one", "many"),
    "kv-int8": Part(
        "8-bit KV cache",
        "--kv-cache-dtype int8",
        ("long",),
        with_={"kv_cache_dtype": "int8"},
        without={"kv_cache_dtype": "auto"},
        refuses=_compiled,
    ),
    "prefetch": _switch(
        "prefetch", "weights and KV fetched ahead", "one", "eight", "long", "many"
    ),
    "huge-pages": _switch("huge-pages", "memory in huge pages", "one", "long", "many"),
    "dealing": _switch(
        "dealing", "work dealt to whichever thread is free", "one", "eight", "many"
    ),
    "spinning": _switch("spinning", "idle threads look for work before they sleep", "one"),
    "split-kv": _switch("split-kv", "a sequence's KV split over threads", "long"),
    "even-tiles": _switch("even-tiles", "a product's rows in even tiles", "many"),
    "shared-pages": _switch("shared-pages", "small matrices in huge pages", "one", "many"),
    "kv-ahead": _switch("kv-ahead", "new pages of the KV cache mapped ahead", "rested", "many"),
    "map-ahead": _switch(
        "map-ahead", "pages of the KV cache mapped while a replica is idle", "rested"
    ),
    "own-runs": _switch(
        "own-runs", "each thread in a run of weights of its own, few rows", "one", "eight"
    ),
    "shared-loading": _switch("shared-loading", "a product's rows loaded by all threads", "many"),
    "last-rows": _switch("last-rows", "only wanted tokens after the last attention", "prompt"),
    "binding": Part(
        "threads kept apart, each on a CPU",
        "--cpu-threads-bind nobind",
        ("one",),
        without={"cpu_threads_bind": "nobind"},
        refuses=_compiled,
    ),
    "chunked-prefill": _flag("enable_chunked_prefill", "long prompts split over steps", "beside"),
    "prefill-share": Part(
        "a bounded share of a step for prompts beside decodes",
        "--prefill-tokens-beside-decodes 0",
        ("beside", "many"),
        without={"prefill_tokens_beside_decodes": 0},
    ),
    "prefill-by-load": _switch(
        "prefill-by-load", "that share by the number of decodes", "beside", "many",
        refuses=_anywhere,
    ),
    "prefill-least": _switch(
        "prefill-least", "steps of few decodes filled up with prompts", "first", "beside",
        refuses=_anywhere,
    ),
    "overtaking": Part(
        "short prompts ahead of long ones, for a bounded time",
        "--prompt-overtaking 0",
        ("burst", "burst-mean"),
        without={"prompt_overtaking": 0.0},
    ),
    "prefix-caching": _flag("enable_prefix_caching", "KV of shared prefixes reused", "shared"),
}  # fmt: skip


def chosen(names: str | None, loads: str | None = None) -> dict[str, Part]:
    """The parts that are named, with commas between, under the loads that are; all by default.

    Raises `ConfigError` for a name that there isn't.
    """
    known = dict.fromkeys(load for part in PARTS.values() for load in part.loads)
    shown = known if loads is None else _named(loads, known, "load")
    parts = PARTS if names is None else {name: PARTS[name] for name in _named(names, PARTS, "part")}
    found = {
        name: replace(part, loads=tuple(load for load in part.loads if load in shown))
        for name, part in parts.items()
    }
    return {name: part for name, part in found.items() if part.loads}


def _named(text: str, known: Collection[str], what: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            there = ", ".join(known)
            raise ConfigError(f"There is no {what} {name!r}; there are {there}.", param=what)
    return names


# -- One engine of an ablation in a process of its own: `python -m benchmarks.compare`.
#
# Reads a JSON object with `config` and `sizes` from its standard input and answers with what the
# engine is, then does a load for each line with its name and a seed, and answers with its figure.


# As where a replica begins: what is imported stays.
if __name__ == "__main__":
    gc.disable()


def facts_of(core: EngineCore) -> dict[str, Any]:
    """The fields of `parts.Facts`."""
    executor = unwrap_uniproc(core.executor)
    spec = executor.loaded.spec
    return {
        "kernels": executor.kernels.name,
        "dtype": core.facts.dtype,
        "quantization": core.config.quantization,
        "experts": getattr(spec, "moe", None) is not None,
    }


def serve(lines: TextIO, answers: TextIO) -> None:
    """Answer until there are no more lines."""

    def answer(found: dict[str, Any]) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    told = json.loads(lines.readline())
    try:
        core = EngineCore(EngineConfig.from_mapping(told["config"]))
        warm_up(core)
    except QuireError as error:
        answer({"error": error.message})
        return
    answer(facts_of(core))
    sizes = Sizes(**told["sizes"])
    for line in lines:
        name, seed = line.split()
        answer({"figure": LOADS[name].run(core, sizes, int(seed))})


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    # What libraries print must not come between the answers.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as pipe:
        os.dup2(2, 1)
        serve(sys.stdin, pipe)


ROOT = Path(__file__).parents[1]


class WorkerFailed(QuireError):
    """An engine of an ablation didn't start, or went away."""


class Worker:
    """A process with an engine; idle, it takes no CPU."""

    def __init__(
        self, config: Mapping[str, Any], sizes: Sizes, environment: Mapping[str, str] | None = None
    ) -> None:
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.compare"],
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )
        try:
            told = {"config": dict(config), "sizes": dataclasses.asdict(sizes)}
            self.facts = Facts(**self._ask(json.dumps(told)))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def figure(self, load: str, seed: int) -> float:
        """Do a load once."""
        return float(self._ask(f"{load} {seed}")["figure"])

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._said.close()

    def _ask(self, line: str) -> dict[str, Any]:
        """The answer to a line. Raises `WorkerFailed` with what the process said last."""
        try:
            print(line, file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()  # type: ignore[union-attr]
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise WorkerFailed(f"The engine ended: {self._last_words()}")
        found: dict[str, Any] = json.loads(answer)
        if "error" in found:
            raise WorkerFailed(found["error"])
        return found

    def _last_words(self) -> str:
        self._process.wait()
        self._said.seek(0)
        lines = self._said.read().split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it said nothing")


@dataclass(frozen=True, slots=True)
class Row:
    """What a part brought to a load.

    Attributes:
        with_, without: medians of the figures, in the load's unit.
        gains: of each turn, how many times as good the figure was with the part.
        skipped: why there are none.
    """

    part: str
    load: str = ""
    with_: float = 0.0
    without: float = 0.0
    gains: tuple[float, ...] = ()
    skipped: str = ""

    def figures(self, switch: str) -> dict[str, Any]:
        """As JSON."""
        row: dict[str, Any] = {"benchmark": "ablation", "part": self.part, "switch": switch}
        if self.skipped:
            return row | {"skipped": self.skipped}
        return row | {
            "load": self.load,
            "unit": LOADS[self.load].unit,
            "with": round(self.with_, 2),
            "without": round(self.without, 2),
            "gain": round(statistics.median(self.gains), 3),
            "gain_low": round(min(self.gains), 3),
            "gain_high": round(max(self.gains), 3),
            "turns": len(self.gains),
        }


def compare(
    parts: Mapping[str, Part],
    config: Mapping[str, Any],
    sizes: Sizes,
    turns: int,
    started: Callable[[Facts], None] = lambda facts: None,
) -> Iterator[Row]:
    """The rows of each part, as they are there; `started` is told what the engine says of itself.

    Raises `WorkerFailed` when the engine doesn't start as `config` says.
    """
    with Worker(config, sizes) as plain:
        started(plain.facts)
        for name, part in parts.items():
            if reason := part.refuses(plain.facts):
                yield Row(name, skipped=reason)
                continue
            try:
                yield from _compare(name, part, config, sizes, turns, plain)
            except WorkerFailed as error:
                yield Row(name, skipped=error.message)


def _compare(
    name: str,
    part: Part,
    config: Mapping[str, Any],
    sizes: Sizes,
    turns: int,
    plain: Worker,
) -> Iterator[Row]:
    own = Worker({**config, **part.with_}, sizes) if part.with_ else plain
    try:
        with Worker({**config, **part.without}, sizes, part.environment) as without:
            for load in part.loads:
                yield _row(name, load, own, without, turns)
    finally:
        if own is not plain:
            own.close()


def _row(name: str, load: str, with_: Worker, without: Worker, turns: int) -> Row:
    """Turns of both, after one each that doesn't count; who begins changes from turn to turn."""
    for worker in (with_, without):
        worker.figure(load, 0)
    pairs = []
    for turn in range(1, turns + 1):
        order = (with_, without) if turn % 2 else (without, with_)
        found = {worker: worker.figure(load, turn) for worker in order}
        pairs.append((found[with_], found[without]))
    return Row(
        name,
        load,
        statistics.median(pair[0] for pair in pairs),
        statistics.median(pair[1] for pair in pairs),
        tuple(LOADS[load].gain(*pair) for pair in pairs),
    )
