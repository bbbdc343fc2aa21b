"""Two ranks with a thread each beside one rank with two threads: `python -m benchmarks.ranks`.

Both are engines in processes of their own, which take turns at the same loads. Two ranks' time is
what the first one computes in steps, what it waits for the other in gathers, and what is between
steps: plans and outputs. Printed are medians in ms a step, and two ranks' tokens a second over one
rank's: the median and the quartiles of turns.

With `--depths 8192,16384` a stream decodes behind a cached prompt of so many tokens, with a third
engine: two ranks with `decode_context_parallel_size=2`. Printed are medians in ms a step, and the
MiB of KV cache that a rank has of that prompt.

The model has random weights; `--layers`, `--hidden`, `--kv-heads` and `--dtype` change its shape.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, cast

from benchmarks.compare import LOADS, submit

#: Of the middle of an MLP to the hidden size, as Llama 3 has it; a head has 64 values.
_INNER, _HEAD = 4, 64
#: Of a cached prompt's engines, and the tokens that they decode a turn.
_DEALT, _DECODED = {"decode_context_parallel_size": 2}, 48


class Turn(NamedTuple):
    """A load's wall time, the time in steps, and that waited in gathers, in seconds; numbers of
    steps and gathers.
    """

    wall_s: float
    steps_s: float
    waited_s: float
    steps: int
    gathers: int


def write_model(folder: Path, hidden: int, layers: int, dtype: str, kv_heads: int) -> None:
    """The config.json of a Llama; `kv_heads`: 0 for a quarter of its heads."""
    heads = hidden // _HEAD
    shape = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": _INNER * hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads or max(2, heads // 4),
        "vocab_size": 32000, "max_position_embeddings": 32768, "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": dtype,
        "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")


def serve(pipe: Connection, folder: str, size: int, settings: dict[str, Any]) -> None:
    """Make an engine with `size` ranks, then run the loads that are named."""
    from engine import LLM

    options = {"max_model_len": 2048, "num_gpu_blocks_override": 1024, **settings}
    llm = LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, num_threads=2,
        tensor_parallel_size=size, **options,
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
        if message == "kv":
            caches = worker.loaded.model.kv_cache_tensors()
            num_bytes = sum(part.nbytes for layer in caches for part in layer)
            pipe.send(num_bytes / worker.capacity.num_blocks / llm.core.config.block_size)
            continue
        seconds.clear()
        if isinstance(message[0], str):
            llm.reset_prefix_cache()
        waited, gathers = worker.collective_s, worker.ranks.num_gathers if worker.ranks else 0
        start = time.perf_counter()
        if isinstance(message[0], str):
            submit(llm, *message)
        else:
            decode(llm, *message)
        wall = time.perf_counter() - start
        waited = worker.collective_s - waited
        gathers = (worker.ranks.num_gathers if worker.ranks else 0) - gathers
        pipe.send(Turn(wall, sum(seconds), waited, len(seconds), gathers))
    llm.core.shutdown()


def decode(llm: Any, depth: int, turn: int) -> None:
    """Decode behind a prompt whose first `depth` tokens are cached from the second turn on."""
    from engine import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=_DECODED, ignore_eos=True)
    llm.generate([[*(4 + index % 200 for index in range(depth)), 4 + turn]], params, use_tqdm=False)


@contextmanager
def running(folder: str, engines: Sequence[tuple[int, dict[str, Any]]]) -> Iterator[list[Any]]:
    """Pipes to engines of these numbers of ranks, with these settings."""
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    for size, settings in engines:
        ours, theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, folder, size, settings)).start()
        pipes.append(ours)
    try:
        for pipe in pipes:
            pipe.recv()
        yield pipes
    finally:
        for pipe in pipes:
            pipe.send(None)


def run_turns(pipes: Sequence[Connection], load: str | int, turns: int) -> list[list[Turn]]:
    """The turns of a load (or of decoding at a depth), by engine. A first turn isn't counted."""
    results: list[list[Turn]] = [[] for _ in pipes]
    for turn in range(turns + 1):
        order = range(len(pipes)) if turn % 2 else reversed(range(len(pipes)))
        for index in order:
            pipes[index].send((load, turn))
            results[index].append(pipes[index].recv())
    return [of_engine[1:] for of_engine in results]


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


def compare_depths(folder: str, depths: Sequence[int], turns: int) -> None:
    """Print a table of decoding at these depths."""
    settings: dict[str, Any] = {"max_model_len": max(depths) + 512, "num_gpu_blocks_override": None}
    settings["cpu_kvcache_space"] = 2.0
    engines = [(1, settings), (2, settings), (2, {**settings, **_DEALT})]
    print("| depth | one rank | two | dealt | dealt over two | MiB a rank: one | two | dealt |")
    print("|---|" + "---:|" * 7)
    with running(folder, engines) as pipes:
        for pipe in pipes:
            pipe.send("kv")
        sizes = [pipe.recv() for pipe in pipes]
        for depth in depths:
            times = [
                statistics.median(1e3 * turn.wall_s / turn.steps for turn in of_engine)
                for of_engine in run_turns(pipes, depth, turns)
            ]
            cells = [f"{time:.2f}" for time in times] + [f"{times[1] / times[2]:.2f}"]
            cells += [f"{size * depth / (1 << 20):.1f}" for size in sizes]
            print(f"| {depth} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ranks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hidden", type=int, default=2048, help="a multiple of 128")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--kv-heads", type=int, default=0, help="default: a quarter of the heads")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--depths", default="", help="of cached prompts, in place of loads")
    parser.add_argument("--loads", default="one,eight,prompt", help=", ".join(LOADS))
    parser.add_argument("--turns", type=int, default=7, help="counted turns")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shape = options.hidden, options.layers, options.dtype, options.kv_heads
        write_model(Path(folder), *shape)
        if options.depths:
            compare_depths(
                folder, [int(depth) for depth in options.depths.split(",")], options.turns
            )
            return
        with running(folder, [(1, {}), (2, {})]) as pipes:
            results = {
                load: run_turns(pipes, load, options.turns) for load in options.loads.split(",")
            }
    parts = "steps: one | two | waits | between: one | two | gathers"
    print(f"| load | one rank | two | {parts} | ratio |")
    print("|---|" + "---:|" * 9)
    for load, (one, two) in results.items():
        print(describe(load, one, two))


if __name__ == "__main__":
    main()
