"""Two ranks with a thread each beside one rank with two threads: `python -m benchmarks.ranks`.

Both are engines in processes of their own, which take turns at the same loads. Two ranks' time is
what the first one computes in steps, what it waits for the other in gathers, and what is between
steps: plans and outputs. Printed are medians in ms a step, and two ranks' tokens a second over one
rank's: the median and the quartiles of turns.

The model has random weights; `--layers`, `--hidden` and `--dtype` change its shape.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, cast

from benchmarks.compare import LOADS, submit

#: Of the middle of an MLP to the hidden size, as Llama 3 has it; a head has 64 values.
_INNER, _HEAD = 4, 64


class Turn(NamedTuple):
    """A load's wall time, the time in steps, and that waited in gathers, in seconds; numbers of
    steps and gathers.
    """

    wall_s: float
    steps_s: float
    waited_s: float
    steps: int
    gathers: int


def write_model(folder: Path, hidden: int, layers: int, dtype: str) -> None:
    """The config.json of a Llama."""
    heads = hidden // _HEAD
    shape = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": _INNER * hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": max(2, heads // 4),
        "vocab_size": 32000, "max_position_embeddings": 4096, "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": dtype,
        "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")


def serve(pipe: Connection, folder: str, size: int) -> None:
    """Make an engine with `size` ranks, then run the loads that are named."""
    from engine import LLM

    llm = LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, num_threads=2,
        tensor_parallel_size=size, max_model_len=2048, num_gpu_blocks_override=1024,
    )  # fmt: skip
    worker = cast(Any, llm.core.executor).worker  # of the first rank
    seconds: list[float] = []

    def timed(run: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return run(*arguments)
            finally:
                seconds.append(time.perf_counter() - start)

        return step

    worker.launch, worker.execute = timed(worker.launch), timed(worker.execute)
    pipe.send("ready")
    while (message := pipe.recv()) is not None:
        seconds.clear()
        llm.reset_prefix_cache()
        waited, gathers = worker.collective_s, worker.ranks.num_gathers if worker.ranks else 0
        start = time.perf_counter()
        submit(llm, *message)
        wall = time.perf_counter() - start
        waited = worker.collective_s - waited
        gathers = (worker.ranks.num_gathers if worker.ranks else 0) - gathers
        pipe.send(Turn(wall, sum(seconds), waited, len(seconds), gathers))
    llm.core.shutdown()


def run_turns(folder: str, loads: Sequence[str], turns: int) -> dict[str, list[list[Turn]]]:
    """By load, the turns of one rank and of two. A first turn isn't counted."""
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    for size in (1, 2):
        ours, theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, folder, size)).start()
        pipes.append(ours)
    try:
        for pipe in pipes:
            pipe.recv()
        results: dict[str, list[list[Turn]]] = {}
        for load in loads:
            results[load] = [[], []]
            for turn in range(turns + 1):
                for index in (0, 1) if turn % 2 else (1, 0):
                    pipes[index].send((load, turn))
                    results[load][index].append(pipes[index].recv())
            for of_engine in results[load]:
                del of_engine[0]
        return results
    finally:
        for pipe in pipes:
            pipe.send(None)


def describe(load: str, one: Sequence[Turn], two: Sequence[Turn]) -> str:
    """A row of the table."""

    def median(turns: Sequence[Turn], value: Callable[[Turn], float]) -> float:
        return statistics.median(1e3 * value(turn) / turn.steps for turn in turns)

    cells = [
        median(one, lambda turn: turn.wall_s),
        median(two, lambda turn: turn.wall_s),
        median(one, lambda turn: turn.steps_s),
        median(two, lambda turn: turn.steps_s - turn.waited_s),
        median(two, lambda turn: turn.waited_s),
        median(one, lambda turn: turn.wall_s - turn.steps_s),
        median(two, lambda turn: turn.wall_s - turn.steps_s),
    ]
    ratios = [a.wall_s / b.wall_s for a, b in zip(one, two, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    gathers = statistics.median(turn.gathers / turn.steps for turn in two)
    row = " | ".join(f"{cell:.2f}" for cell in cells)
    return f"| {load} | {row} | {gathers:.0f} | {middle:.2f} ({low:.2f} to {high:.2f}) |"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ranks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hidden", type=int, default=2048, help="a multiple of 128")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--loads", default="one,eight,prompt", help=", ".join(LOADS))
    parser.add_argument("--turns", type=int, default=7, help="counted turns")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), options.hidden, options.layers, options.dtype)
        results = run_turns(folder, options.loads.split(","), options.turns)
    parts = "steps: one | two | waits | between: one | two | gathers"
    print(f"| load | one rank | two | {parts} | ratio |")
    print("|---|" + "---:|" * 9)
    for load, (one, two) in results.items():
        print(describe(load, one, two))


if __name__ == "__main__":
    main()
