"""What drafts bring: `python -m benchmarks.speculation --model FOLDER`.

Three engines answer the same questions in turns, each in a process of its own: one without drafts
before and behind, between these one with drafts and another one without. The demo model is too
small to tell; `python -m demo.widen` makes one that says the same at a larger model's cost. `ratio`
and `ratio_cpu` are tokens per second with drafts through those without, by the clock and by
processor time, each the median of all turns with its lower and upper quartile: of short turns many
tell more than a few long ones. `all` and `all_cpu` are of all turns together. `control` and
`control_cpu` are the other engine's without drafts: how far such ratios spread where there is
nothing to see. The method `off` has drafts in no step: what is left then is what being ready for
them costs.

With `--one-engine` it's the same engine each time, whose drafts are set aside in three of four
turns. What lies between two engines of a machine, up to a tenth, is no part of the ratios then; nor
is what being ready for drafts costs.

`tok_s`, `ttft_ms` and `gap_ms` are without drafts and with them; the latter medians of requests: to
the first token, and from one of a request's deltas to the next. `steps`, `drafted_steps`, `drafts`
and `in_vain` count; `planning_us` is the processor time that it takes to give a step drafts or
none, beside a draft model's own, and `planning_share` its part of all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.apart import Apart
from benchmarks.speculation_texts import KINDS, TOOLS
from benchmarks.statistics import percentile
from engine.contract.sampling_params import SamplingParams
from engine.core.warmup import warm_up
from engine.offline.llm import LLM


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
        sum(len(answer.token_ids) for answer in answers),
        seconds,
        cpu,
        [answer.text for answer in answers],
        [answer.queue_time + answer.prefill_time for answer in flights],
        [
            answer.decode_time / max(1, answer.num_steps - answer.prefill_chunks)
            for answer in flights
        ],
    )


@contextlib.contextmanager
def without_drafts(llm: LLM) -> Iterator[None]:
    """What the engine is asked meanwhile gets no drafts, and no head follows it. Nor does it give
    anything to what drafts may cost, or trials: that would all be spent in the turns that have
    some.
    """
    drafter = llm.core.drafter
    if drafter is None:
        raise ValueError("the engine has no drafts")
    propose, note_step, model = drafter.propose, drafter.note_step, drafter.model
    drafter.propose = lambda *args: {}  # type: ignore[method-assign]
    drafter.note_step = lambda *args: None  # type: ignore[method-assign]
    if model is not None:
        takes = model.supports
        model.supports = lambda sequence: False  # type: ignore[method-assign]
    timing, drafter.timing = drafter.timing, True
    try:
        yield
    finally:
        drafter.timing = timing
        drafter.propose, drafter.note_step = propose, note_step  # type: ignore[method-assign]
        if model is not None:
            model.supports = takes  # type: ignore[method-assign]


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
        self.clear()
        self._propose, self._draw = drafter.propose, None
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

    def _drawn(self, requests: Any) -> dict[int, list[int]]:
        started = time.thread_time()
        drafts: dict[int, list[int]] = self._draw(requests)  # type: ignore[misc]
        self.seconds -= time.thread_time() - started
        return drafts

    def clear(self) -> None:
        """Count from nothing."""
        self.steps, self.drafted, self.seconds = 0, 0, 0.0


class Answers:
    """Answers the questions of turns with one engine."""

    def __init__(self, llm: LLM) -> None:
        warm_up(llm.core)
        ask(llm, [KINDS["story"](random.Random(0), llm)], 16)
        self._llm = llm
        self._planning = Planning(llm) if llm.core.drafter is not None else None

    def questions(self, kind: str, streams: int, turn: int) -> list[Any]:
        """Of one turn; some quote an answer of the engine's."""
        rng = random.Random(f"{kind} {streams} {turn}")
        return [KINDS[kind](rng, self._llm) for _ in range(streams)]

    def ask(self, questions: list[Any], max_tokens: int, kind: str) -> Turn:
        """One turn."""
        return ask(self._llm, questions, max_tokens, kind)

    def without_drafts(self, method: str, *args: Any) -> Any:
        """What a method returns while the engine's drafts are set aside."""
        with without_drafts(self._llm):
            return getattr(self, method)(*args)

    def begin(self) -> None:
        """Count from nothing."""
        self._llm.core.reset_stats()
        if self._planning is not None:
            self._planning.clear()

    def counted(self) -> dict[str, float]:
        """What became of the drafts since."""
        if self._planning is None:
            raise ValueError("the engine has no drafts")
        stats, planning = self._llm.core.stats, self._planning
        drafts = stats.spec_decode_num_draft_tokens_total
        num_accepted = stats.spec_decode_num_accepted_tokens_total
        rows = max(1, stats.spec_decode_num_drafts_total)
        return {
            "steps": planning.steps,
            "drafted_steps": planning.drafted,
            "planning_us": round(1e6 * planning.seconds / max(1, planning.steps), 1),
            "planning_s": planning.seconds,
            "drafts": drafts,
            "in_vain": drafts - num_accepted,
            "tokens_a_drafted_row": round(1 + num_accepted / rows, 2),
        }


class Engine(Protocol):
    """What answers, somewhere: `call` runs a method of its `Answers`."""

    def call(self, method: str, *args: object) -> Any: ...


@dataclass(frozen=True, slots=True)
class Without:
    """An engine whose drafts are set aside."""

    engine: Engine

    def call(self, method: str, *args: object) -> Any:
        """As the engine's."""
        return self.engine.call("without_drafts", method, *args)


@dataclass(frozen=True, slots=True)
class Compared:
    """One turn of all engines."""

    first_undrafted: Turn
    drafted: Turn
    control: Turn
    last_undrafted: Turn

    def ratio(self, drafted: Turn, by: str) -> float:
        """How many times the tokens per second without drafts, `by` the clock or processor time."""
        return drafted.tokens / max(getattr(drafted, by), 1e-9) / self.undrafted_rate(by)

    def undrafted_rate(self, by: str) -> float:
        """Tokens per second without drafts."""
        around = (self.first_undrafted, self.last_undrafted)
        return sum(turn.tokens for turn in around) / sum(getattr(turn, by) for turn in around)


def compare(
    engines: tuple[Engine, Engine, Engine], kind: str, streams: int, turns: int, max_tokens: int
) -> dict[str, Any]:
    """One row: ratios of the turns, and what became of the drafts.

    Args:
        engines: without drafts, with them, and the other one without.
    """
    undrafted, drafting, control = engines
    results: list[Compared] = []
    drafting.call("begin")
    for number in range(turns):
        questions = undrafted.call("questions", kind, streams, number)
        # The two take turns in which is first.
        order = [drafting, control] if number % 2 == 0 else [control, drafting]
        first_undrafted, first, second, last_undrafted = (
            engine.call("ask", questions, max_tokens, kind)
            for engine in (undrafted, *order, undrafted)
        )
        on, off = (first, second) if order[0] is drafting else (second, first)
        results.append(Compared(first_undrafted, on, off, last_undrafted))
    counted = drafting.call("counted")
    sides = [result.first_undrafted for result in results], [result.drafted for result in results]
    return {
        "benchmark": "speculation",
        "text": kind,
        "streams": streams,
        "tok_s": [round(_tokens(side) / _sum(side, "seconds"), 1) for side in sides],
        **_ratios(results, "", "seconds"),
        **_ratios(results, "_cpu", "cpu"),
        "ttft_ms": [_median_ms([x for turn in side for x in turn.first]) for side in sides],
        "gap_ms": [_median_ms([x for turn in side for x in turn.gaps]) for side in sides],
        "planning_share": round(counted.pop("planning_s") / _sum(sides[1], "cpu"), 4),
        **counted,
        "same_texts": sum(
            a == b
            for turn in results
            for a, b in zip(turn.first_undrafted.texts, turn.drafted.texts, strict=True)
        )
        / (turns * streams),
    }


def _tokens(turns: list[Turn]) -> int:
    return sum(turn.tokens for turn in turns)


def _sum(turns: list[Turn], by: str) -> float:
    return sum(getattr(turn, by) for turn in turns)


def _ratios(results: list[Compared], how: str, by: str) -> dict[str, Any]:
    """Of the engine with drafts and the other one without, over the one that ran around them."""
    drafted = [turn.ratio(turn.drafted, by) for turn in results]
    control = [turn.ratio(turn.control, by) for turn in results]
    around = [side for turn in results for side in (turn.first_undrafted, turn.last_undrafted)]
    on = [turn.drafted for turn in results]
    of_all = _tokens(on) / _sum(on, by) / (_tokens(around) / _sum(around, by))
    return {
        f"ratio{how}": round(percentile(drafted, 50), 3),
        f"ratio{how}_quartiles": [round(percentile(drafted, q), 3) for q in (25, 75)],
        f"all{how}": round(of_all, 3),
        f"control{how}": round(percentile(control, 50), 3),
        f"control{how}_quartiles": [round(percentile(control, q), 3) for q in (25, 75)],
    }


def _median_ms(seconds: list[float]) -> float:
    return round(1000 * percentile(seconds, 50), 1)


def main(argv: list[str] | None = None) -> None:
    """Print a line of JSON for each kind of text and number of streams."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation", description=__doc__)
    parser.add_argument("--model", default="demo/model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", help="of all engines, as the setting")
    parser.add_argument("--method", default="ngram", help="as in speculative_config, or `off`")
    parser.add_argument("--draft", help="folder of the draft model, or of the heads")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--texts", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument(
        "--one-engine", action="store_true", help="one whose drafts are set aside in between"
    )
    args = parser.parse_args(argv)
    settings: dict[str, Any] = {"dtype": args.dtype, "max_model_len": 1024}
    settings["quantization"] = args.quantization
    settings["enable_prefix_caching"] = False
    speculative_config: dict[str, Any] = {"method": args.method}
    if args.method == "off":
        speculative_config = {"method": "ngram", "disable_by_batch_size": 1}
    elif args.draft:
        speculative_config["model"] = args.draft
    with contextlib.ExitStack() as stack:
        engines = _engines(stack, args.model, settings, speculative_config, one=args.one_engine)
        for kind in args.texts:
            for streams in args.streams:
                row = compare(engines, kind, streams, args.turns, args.max_tokens)
                row_values = {"method": args.method, "quantization": args.quantization, **row}
                print(json.dumps(row_values), flush=True)


def _engines(
    stack: contextlib.ExitStack,
    model: str,
    settings: dict[str, Any],
    speculative_config: dict[str, Any],
    *,
    one: bool,
) -> tuple[Engine, Engine, Engine]:
    """Without drafts, with them, and another one without; `request_detail`: it's always the
    same."""
    enter = stack.enter_context
    if one:
        drafting = enter(
            Apart.started(Answers, model, **settings, speculative_config=speculative_config)
        )
        return Without(drafting), drafting, Without(drafting)
    return (
        enter(Apart.started(Answers, model, **settings)),
        enter(Apart.started(Answers, model, **settings, speculative_config=speculative_config)),
        enter(Apart.started(Answers, model, **settings)),
    )


if __name__ == "__main__":
    main()
