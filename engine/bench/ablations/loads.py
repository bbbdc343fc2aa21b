"""What the two engines of an ablation are given to do, and the figure that is compared."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.bench.offline import run_jobs
from engine.bench.statistics import mean, percentile
from engine.bench.workload import Job, random_jobs
from engine.core.engine_core import EngineCore


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
