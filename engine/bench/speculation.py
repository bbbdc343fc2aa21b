"""What drafts bring: `python -m engine.bench.speculation --model FOLDER`.

Two engines, one with drafts and one without, answer the same questions in turns (on, off, off,
on). The demo model is too small to tell; `python -m demo.widen` makes one that says the same at a
larger model's cost. `ratio` and `ratio_cpu` are tokens per second with drafts through those
without, by the clock and by processor time, each the median of all pairs of turns with its lower
and upper quartile: of short turns in pairs many tell more than a few long ones. `all` and `all_cpu`
are of all turns together. The method `off` has drafts in no step: what is left then is what being
ready for them costs, and how far such ratios spread where there's nothing to see. With AVX2 the
engine that a process makes second is some percent slower, whatever it can do: run it with
`--drafts-first` as well, and take the mean.

`tok_s`, `ttft_ms` and `gap_ms` are without drafts and with them; the latter medians of requests: to
the first token, and from one of a request's deltas to the next. `steps`, `drafted_steps`, `drafts`
and `in_vain` count; `planning_us` is the processor time that it takes to give a step drafts or
none, beside a draft model's own, and `planning_share` its part of all.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from typing import Any

from engine.bench.speculation_texts import KINDS, TOOLS
from engine.bench.statistics import percentile
from engine.contract.sampling_params import SamplingParams
from engine.offline.llm import LLM
from engine.serving.warmup import warm_up


@dataclass(slots=True)
class Turn:
    """One engine's answers to the questions of one turn."""

    tokens: int
    seconds: float
    cpu: float
    texts: list[str]
    first: list[float]
    gaps: list[float]


def ask(llm: LLM, questions: list[Any], max_tokens: int, kind: str = "") -> Turn:
    """All questions at once; conversations, or texts to go on with."""
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    cpu, started = time.process_time(), time.perf_counter()
    if isinstance(questions[0], str):
        sampling.ignore_eos = True
        outputs = llm.generate(questions, sampling, use_tqdm=False)
    else:
        outputs = llm.chat(questions, sampling, use_tqdm=False, tools=TOOLS.get(kind))
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    answers = [output.outputs[0] for output in outputs]
    flights = [output.flights[0] for output in outputs]
    return Turn(
        sum(len(each.token_ids) for each in answers),
        seconds,
        cpu,
        [each.text for each in answers],
        [each.queue_time + each.prefill_time for each in flights],
        [each.decode_time / max(1, each.num_steps - each.prefill_chunks) for each in flights],
    )


class Planning:
    """Counts what an engine's drafter is asked, and how long it takes.

    Attributes:
        steps, drafted: planned, and those with drafts.
        seconds: of processor time, a draft model's own left out.
    """

    def __init__(self, llm: LLM) -> None:
        drafter = llm.core.drafter
        if drafter is None:
            raise ValueError("the engine has no drafts")
        self.steps, self.drafted, self.seconds = 0, 0, 0.0
        self._drafter, self._propose, self._draw = drafter, drafter.propose, None
        drafter.propose = self._planned  # type: ignore[method-assign,assignment]
        if (model := drafter.model) is not None:
            self._draw = model.propose
            model.propose = self._drawn  # type: ignore[method-assign]

    def _planned(self, *args: Any) -> dict[int, list[int]]:
        started = time.thread_time()
        drafts = self._propose(*args)
        self.seconds += time.thread_time() - started
        self.steps += 1
        self.drafted += bool(drafts)
        return drafts

    def _drawn(self, wanted: Any) -> dict[int, list[int]]:
        started = time.thread_time()
        drafts: dict[int, list[int]] = self._draw(wanted)  # type: ignore[misc]
        self.seconds -= time.thread_time() - started
        return drafts

    def end(self) -> None:
        """Count no more."""
        self._drafter.propose = self._propose  # type: ignore[method-assign]
        if self._drafter.model is not None:
            self._drafter.model.propose = self._draw  # type: ignore[method-assign,assignment]


def compare(
    plain: LLM, drafting: LLM, kind: str, streams: int, turns: int, max_tokens: int
) -> dict[str, Any]:
    """One row: ratios of the turns, and what became of the drafts."""
    rng = random.Random(f"{kind} {streams}")
    pairs: list[tuple[Turn, Turn]] = []
    drafting.core.reset_stats()
    planning = Planning(drafting)
    for number in range(turns):
        questions = [KINDS[kind](rng, plain) for _ in range(streams)]
        order = [drafting, plain] if number % 2 == 0 else [plain, drafting]
        told = {llm is drafting: ask(llm, questions, max_tokens, kind) for llm in order}
        pairs.append((told[False], told[True]))
    planning.end()
    stats = drafting.core.stats
    rows = max(1, stats.spec_decode_num_drafts_total)
    drafts, held = (
        stats.spec_decode_num_draft_tokens_total,
        stats.spec_decode_num_accepted_tokens_total,
    )
    steps = max(1, planning.steps)
    return {
        "benchmark": "speculation",
        "method": (drafting.config.speculative_config or {}).get("method"),
        "quantization": drafting.config.quantization,
        "text": kind,
        "streams": streams,
        "tok_s": [round(_tokens(side) / _sum(side, "seconds"), 1) for side in _sides(pairs)],
        **_ratios(pairs, "ratio", "all", "seconds"),
        **_ratios(pairs, "ratio_cpu", "all_cpu", "cpu"),
        "ttft_ms": [_median_ms([x for turn in side for x in turn.first]) for side in _sides(pairs)],
        "gap_ms": [_median_ms([x for turn in side for x in turn.gaps]) for side in _sides(pairs)],
        "steps": planning.steps,
        "drafted_steps": planning.drafted,
        "planning_us": round(1e6 * planning.seconds / steps, 1),
        "planning_share": round(planning.seconds / _sum(_sides(pairs)[1], "cpu"), 4),
        "drafts": drafts,
        "in_vain": drafts - held,
        "tokens_a_drafted_row": round(1 + held / rows, 2),
        "same_texts": sum(
            a == b for plain, on in pairs for a, b in zip(plain.texts, on.texts, strict=True)
        )
        / (turns * streams),
    }


def _sides(pairs: list[tuple[Turn, Turn]]) -> list[list[Turn]]:
    """The turns without drafts, and those with them."""
    return [[pair[place] for pair in pairs] for place in range(2)]


def _tokens(turns: list[Turn]) -> int:
    return sum(turn.tokens for turn in turns)


def _sum(turns: list[Turn], by: str) -> float:
    return sum(getattr(turn, by) for turn in turns)


def _ratios(pairs: list[tuple[Turn, Turn]], name: str, total: str, by: str) -> dict[str, Any]:
    """How many times the tokens per second, `by` the clock or processor time."""
    each = [
        on.tokens / off.tokens * getattr(off, by) / max(getattr(on, by), 1e-9) for off, on in pairs
    ]
    off, on = _sides(pairs)
    of_all = _tokens(on) / _tokens(off) * _sum(off, by) / max(_sum(on, by), 1e-9)
    median, low, high = (round(percentile(each, q), 3) for q in (50, 25, 75))
    return {name: median, f"{name}_quartiles": [low, high], total: round(of_all, 3)}


def _median_ms(seconds: list[float]) -> float:
    return round(1000 * percentile(seconds, 50), 1)


def main() -> None:
    """Print a line of JSON for each kind of text and number of streams."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.speculation", description=__doc__)
    parser.add_argument("--model", default="demo/model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", help="of both engines, as the setting")
    parser.add_argument("--method", default="ngram", help="as in speculative_config, or `off`")
    parser.add_argument("--draft", help="folder of the draft model, or of the heads")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--texts", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument(
        "--drafts-first", action="store_true", help="make the engine with drafts first"
    )
    args = parser.parse_args()
    settings: dict[str, Any] = {"model": args.model, "dtype": args.dtype, "max_model_len": 1024}
    settings["quantization"] = args.quantization
    settings["enable_prefix_caching"] = False
    wanted: dict[str, Any] = {"method": args.method}
    if args.method == "off":
        wanted = {"method": "ngram", "disable_by_batch_size": 1}
    elif args.draft:
        wanted["model"] = args.draft
    drafted = {**settings, "speculative_config": wanted}
    if args.drafts_first:
        drafting, plain = LLM(**drafted), LLM(**settings)
    else:
        plain, drafting = LLM(**settings), LLM(**drafted)
    for llm in (plain, drafting):
        warm_up(llm.core)
        ask(llm, [KINDS["story"](random.Random(0), llm)], 16)
    for kind in args.texts:
        for streams in args.streams:
            row = compare(plain, drafting, kind, streams, args.turns, args.max_tokens)
            print(json.dumps({**row, "drafts_first": args.drafts_first}), flush=True)


if __name__ == "__main__":
    main()
