"""What one unusual request costs those beside it: `python -m benchmarks.odd_rows`.

Steps of 16 sequences that decode, of which one wants log probabilities, a penalty, a grammar or the
like, in turns with steps of 16 plain ones. Each figure is plain time through that time, by CPU
and by the clock: 1 means that the odd request costs nothing. On a busy machine read the CPU's.
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any

from benchmarks.statistics import percentile
from engine.contract.engine_config import EngineConfig
from engine.contract.messages import EngineRequest
from engine.contract.sampling_params import SamplingParams
from engine.contract.structured_outputs import StructuredOutputsParams
from engine.core.engine_core import EngineCore

KINDS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 5},
    "penalty": {"presence_penalty": 0.5},
    "logit_bias": {"logit_bias": {5: 2.0}},
    "allowed_token_ids": {"allowed_token_ids": list(range(10, 400))},
    "bad_words": {"bad_words_token_ids": [[5, 6, 7]]},
    "min_tokens": {"min_tokens": 100, "stop_token_ids": [5]},
    "grammar": {"structured_outputs": StructuredOutputsParams(regex="[a-z ]{2000}")},
    "prompt_logprobs": {"prompt_logprobs": 2},
}
_PROMPT_TOKENS = 32


class Bench:
    """An engine, and steps of so many sequences on it."""

    def __init__(self, config: EngineConfig, running: int, steps: int) -> None:
        self._core = EngineCore(config)
        self._running, self._steps = running, steps
        self._ids = itertools.count()

    def measure(self, odd: dict[str, Any]) -> tuple[float, float]:
        """CPU and wall seconds of the steps; the last sequence has the settings `odd`."""
        core = self._core
        for index in range(self._running):
            self._add(index, odd if index == self._running - 1 else {})
        while core.structured.num_waiting or core.scheduler.waiting:
            core.step()
        for _ in range(4):
            core.step()
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(self._steps):
            core.step()
        spent = time.process_time() - cpu, time.perf_counter() - wall
        for request in list(core.requests):
            core.abort(request)
        core.step()
        return spent

    def _add(self, index: int, settings: dict[str, Any]) -> None:
        options = {"temperature": 0, "max_tokens": self._steps + 64, "ignore_eos": True}
        message = EngineRequest(
            request_id=str(next(self._ids)),
            gateway_id="",
            prompt_token_ids=[10 + index] * _PROMPT_TOKENS,
            sampling=SamplingParams(**{**options, **settings}),
        )
        self._core.add_request(message)


def main() -> None:
    """Print a line a kind."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.odd_rows", description=__doc__)
    parser.add_argument("--model", default="demo/model")
    parser.add_argument("--running", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    config = EngineConfig(model=args.model, enable_prefix_caching=False, max_model_len=1024)
    bench = Bench(config, args.running, args.steps)
    bench.measure({})
    for kind, settings in KINDS.items():
        ratios = []
        for _ in range(args.rounds):
            usual, odd = bench.measure({}), bench.measure(settings)
            ratios.append(
                [usual_time / after for usual_time, after in zip(usual, odd, strict=True)]
            )
        cpu, wall = (round(percentile(list(column), 50), 3) for column in zip(*ratios, strict=True))
        print(f"{kind:<18} {cpu:.2f} by CPU  {wall:.2f} by the clock", flush=True)


if __name__ == "__main__":
    main()
