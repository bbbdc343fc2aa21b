"""What drafts bring: `python -m engine.bench.speculation --model FOLDER`.

Two engines, one with drafts and one without, answer the same questions in turns. The demo model is
too small to tell; `python -m demo.widen` makes one that says the same at a larger model's cost.
Each `ratio` is tokens per second with drafts through those without, of all turns together;
`ratio_cpu` by processor time, which is what to read on a busy machine. The method `off` has drafts
in no step: what is left then is what being ready for them costs. `tok_s`, `ttft_ms` and `gap_ms`
are without drafts and with them; the latter medians of requests: to the first token, and from one
of a request's deltas to the next.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.bench.statistics import percentile
from engine.contract.sampling_params import SamplingParams
from engine.offline.llm import LLM
from engine.serving.warmup import warm_up

_COUNTRIES = (
    "France", "Poland", "Oman", "Kenya", "Japan", "Peru", "Malta", "China", "Norway", "Laos",
)  # fmt: skip
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
_HEROES = ("fairy", "pirate", "bear", "snail", "wizard", "queen", "miller", "fox", "robot", "giant")
Conversation = list[dict[str, str]]


def _again(rng: random.Random, llm: LLM) -> Conversation:
    question = _story(rng, llm)
    (story,) = ask(llm, [question], 200).texts
    return [*question, {"role": "assistant", "content": story}, *question]


def _story(rng: random.Random, llm: LLM) -> Conversation:
    return [{"role": "user", "content": f"Tell me a story about a {rng.choice(_HEROES)}."}]


def _echo(rng: random.Random, llm: LLM) -> Conversation:
    words = " ".join(rng.sample(_COUNTRIES, 8))  # more is beyond the demo model
    return [{"role": "user", "content": f"Repeat after me: {words}"}]


def _agent(rng: random.Random, llm: LLM) -> Conversation:
    told: Conversation = []
    *before, last = rng.sample(("Paris", "London", "Rome", "Madrid", "Oslo", "Vienna"), 4)
    for city in before:
        call = json.dumps({"name": "get_weather", "arguments": {"city": city}})
        found = json.dumps({"temperature": rng.randrange(30), "condition": "sunny"})
        told += [
            {"role": "user", "content": f"What is the weather in {city}?"},
            {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
            {"role": "tool", "content": found},
        ]
    return [*told, {"role": "user", "content": f"What is the weather in {last}?"}]


def _sum(rng: random.Random, llm: LLM) -> Conversation:
    numbers = rng.randrange(10, 99), rng.randrange(10, 99)
    return [{"role": "user", "content": f"What is {numbers[0]} + {numbers[1]}?"}]


def _loop(rng: random.Random, llm: LLM) -> str:
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    start = rng.randrange(len(text) - 400)
    return text[start : start + 400]


#: What the answers are like: as a call before but for a word, as a story before (perhaps), as the
#: question, like each other, like nothing. "loop" goes on with a page of the documentation, which
#: the demo model can't: it goes round in circles.
KINDS: dict[str, Callable[[random.Random, LLM], Any]] = {
    "again": _again,
    "agent": _agent,
    "echo": _echo,
    "loop": _loop,
    "story": _story,
    "sum": _sum,
}


@dataclass(slots=True)
class Turn:
    """One engine's answers to the questions of one turn."""

    tokens: int
    seconds: float
    cpu: float
    texts: list[str]
    first: list[float]
    gaps: list[float]


def ask(llm: LLM, questions: list[Any], max_tokens: int) -> Turn:
    """All questions at once; conversations, or texts to go on with."""
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    cpu, started = time.process_time(), time.perf_counter()
    if isinstance(questions[0], str):
        sampling.ignore_eos = True
        outputs = llm.generate(questions, sampling, use_tqdm=False)
    else:
        outputs = llm.chat(questions, sampling, use_tqdm=False)
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


def compare(
    plain: LLM, drafting: LLM, kind: str, streams: int, turns: int, max_tokens: int
) -> dict[str, Any]:
    """One row: ratios of the turns, and what became of the drafts."""
    rng, same = random.Random(f"{kind} {streams}"), 0
    ratios = []
    first: tuple[list[float], ...] = [], []
    gaps: tuple[list[float], ...] = [], []
    totals = [[0, 0.0, 0.0], [0, 0.0, 0.0]]
    drafting.core.reset_stats()
    for number in range(turns):
        questions = [KINDS[kind](rng, plain) for _ in range(streams)]
        pair = [plain, drafting]
        order = pair if number % 2 else pair[::-1]
        told = {llm is drafting: ask(llm, questions, max_tokens) for llm in order}
        without, with_ = told[False], told[True]
        for total, turn in zip(totals, (without, with_), strict=True):
            total[:] = total[0] + turn.tokens, total[1] + turn.seconds, total[2] + turn.cpu
        ratios.append((with_.tokens / with_.seconds) / (without.tokens / without.seconds))
        for place, turn in enumerate((without, with_)):
            first[place].extend(turn.first)
            gaps[place].extend(turn.gaps)
        same += sum(a == b for a, b in zip(without.texts, with_.texts, strict=True))
    stats = drafting.core.stats
    rows = max(1, stats.spec_decode_num_drafts_total)
    return {
        "benchmark": "speculation",
        "method": (drafting.config.speculative_config or {}).get("method"),
        "text": kind,
        "streams": streams,
        "tok_s": [round(tokens / seconds, 1) for tokens, seconds, _ in totals],
        "ratio": round(_rate(totals[1][:2]) / _rate(totals[0][:2]), 3),
        "ratio_cpu": round(_rate(totals[1][::2]) / _rate(totals[0][::2]), 3),
        "ratio_median": round(percentile(ratios, 50), 3),
        "ratio_low": round(min(ratios), 3),
        "ratio_high": round(max(ratios), 3),
        "ttft_ms": [round(1000 * percentile(each, 50), 1) for each in first],
        "gap_ms": [round(1000 * percentile(each, 50), 1) for each in gaps],
        "drafts": stats.spec_decode_num_draft_tokens_total,
        "accepted": stats.spec_decode_num_accepted_tokens_total,
        "tokens_a_drafted_row": round(1 + stats.spec_decode_num_accepted_tokens_total / rows, 2),
        "same_texts": same / (turns * streams),
    }


def _rate(total: list[float]) -> float:
    return total[0] / total[1]


def main() -> None:
    """Print a line of JSON for each kind of text and number of streams."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.speculation", description=__doc__)
    parser.add_argument("--model", default="demo/model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--method", default="ngram", help="as in speculative_config, or `off`")
    parser.add_argument("--draft", help="folder of the draft model, or of the heads")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--texts", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    settings = {"model": args.model, "dtype": args.dtype, "max_model_len": 1024}
    settings["enable_prefix_caching"] = False
    plain = LLM(**settings)
    wanted: dict[str, Any] = {"method": args.method}
    if args.method == "off":
        wanted = {"method": "ngram", "disable_by_batch_size": 1}
    elif args.draft:
        wanted["model"] = args.draft
    drafting = LLM(**settings, speculative_config=wanted)
    for llm in (plain, drafting):
        warm_up(llm.core)
        ask(llm, [_story(random.Random(0), llm)], 16)
    for kind in args.texts:
        for streams in args.streams:
            row = compare(plain, drafting, kind, streams, args.turns, args.max_tokens)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
