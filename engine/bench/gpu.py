"""`python -m engine.bench.gpu`: an 8B-shaped Llama on a GPU, beside what the GPU can do.

Weights are random: speed doesn't depend on them. `manage.py bench kernels` runs the kernels' table
and this one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from engine.bench.offline import run_jobs
from engine.bench.workload import random_jobs
from engine.config import EngineConfig
from engine.core import EngineCore
from kernels.bench import gpu as kernel_bench
from kernels.bench.device_timing import GpuCeilings, measure_ceilings

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""Llama 3.1 8B."""
GOALS = {"one stream": 0.85, "prefill": 0.60}


def decode_seconds(core: EngineCore, batch: int, input_len: int, output_len: int) -> float:
    """Median time of a step in which all sequences decode, after a warm-up run."""
    vocab = core.loaded.spec.vocab_size
    steps: list[float] = []
    for seed in range(2):
        core.reset_prefix_cache()
        lengths = (input_len, input_len), (output_len, output_len)
        steps = run_jobs(core, random_jobs(batch, vocab, *lengths, seed=seed))["steps"]
    # The last steps are decodes of all: prompts come first, and all end together.
    return statistics.median(steps[-output_len // 2 :])


def host_share(core: EngineCore, batch: int) -> float:
    """The part of a run's time in which the device has nothing to do, by torch's profiler."""
    jobs = random_jobs(batch, core.loaded.spec.vocab_size, (16, 16), (128, 128), seed=3)
    core.reset_prefix_cache()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        wall = run_jobs(core, jobs)["seconds"]
    busy = sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6
    return max(0.0, 1 - busy / wall)


def engine_rows(folder: Path, ceilings: GpuCeilings) -> Iterator[dict[str, Any]]:
    """Decode of one stream and of 256, with and without graphs, and a prompt of 8192 tokens."""
    for eager in (False, True):
        core = _core(folder, eager)
        how = "eager" if eager else "graphs"
        one = decode_seconds(core, 1, 16, 128)
        moved = core.loaded.model.decode_bytes
        yield {
            "figure": f"one stream, {how}", "tok_s": round(1 / one, 1),
            "of_copy": round(moved / one / ceilings.copy, 3), "goal": GOALS["one stream"],
        }  # fmt: skip
        many = decode_seconds(core, 256, 128, 64)
        yield {
            "figure": f"256 streams, {how}", "tok_s": round(256 / many), "step_ms": many * 1e3,
            "host_share": round(host_share(core, 256), 3),
        }  # fmt: skip
        if not eager:
            yield _prefill_row(core, ceilings)
        del core
        torch.cuda.empty_cache()


def _prefill_row(core: EngineCore, ceilings: GpuCeilings) -> dict[str, Any]:
    spec, tokens = core.loaded.spec, 8192
    seconds = []
    for seed in range(4):
        core.reset_prefix_cache()
        job = random_jobs(1, spec.vocab_size, (tokens, tokens), (1, 1), seed=seed)
        seconds.append(run_jobs(core, job)["seconds"])
    best = statistics.median(seconds[1:])
    # Products of every weight but the embedding, and of attention over half of the square.
    matrices = SHAPE["num_hidden_layers"] * (
        SHAPE["hidden_size"] ** 2 * 2.5 + 3 * SHAPE["hidden_size"] * SHAPE["intermediate_size"]
    )
    attention = SHAPE["num_hidden_layers"] * 2 * SHAPE["hidden_size"] * tokens**2
    rate = (2 * matrices * tokens + attention) / best
    return {
        "figure": "prefill of 8192", "tok_s": round(tokens / best),
        "of_matmul": round(rate / ceilings.matmul, 3), "goal": GOALS["prefill"],
    }  # fmt: skip


def transformers_row(folder: Path) -> dict[str, Any]:
    """`transformers` generate on the same shape, one stream."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    ids = torch.randint(4, 1000, (1, 16), device="cuda")
    times = []
    for count in (32, 32, 160):
        torch.cuda.synchronize()
        started = time.perf_counter()
        model.generate(ids, min_new_tokens=count, max_new_tokens=count, do_sample=False)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return {"figure": "transformers, one stream", "tok_s": round(128 / (times[2] - times[1]), 1)}


def _core(folder: Path, eager: bool) -> EngineCore:
    return EngineCore(
        EngineConfig(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            device="cuda",
            max_model_len=8448,
            max_num_seqs=256,
            enforce_eager=eager,
        )
    )


def run(write: Callable[[str], object] = print, transformers: bool = True) -> None:
    """Write a JSON object a figure, after one with the ceilings."""
    ceilings = measure_ceilings()
    write(json.dumps({"copy_gb_s": ceilings.copy / 1e9, "matmul_tflop_s": ceilings.matmul / 1e12}))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
        for row in engine_rows(folder, ceilings):
            write(json.dumps(row))
        if transformers:
            write(json.dumps(transformers_row(folder)))


def run_kernels(write: Callable[[str], object] = print) -> None:
    """The kernels' table, then the model's figures."""
    kernel_bench.run(write)
    run(write)


def main() -> int:
    """Print the figures; 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.gpu", description=__doc__)
    parser.add_argument("--no-transformers", action="store_true", help="skip the comparison")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch sees no CUDA device.", file=sys.stderr)
        return 2
    run(transformers=not options.no_transformers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
