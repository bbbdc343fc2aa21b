"""`python -m benchmarks.gpu`: an 8B-shaped Llama on a GPU, beside what the GPU can do.

Weights are random: speed doesn't depend on them. Ceilings are a large copy and a large product of
the same run. Step times are medians over the second half of a run, after one to warm up.
`manage.py bench kernels` runs the kernels' table and this one; `--smoke` runs all of it in small,
on a CPU where there's no GPU, to see that it works.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels import gpu as kernel_bench
from benchmarks.kernels.device_timing import GpuCeilings, graphed_seconds, measure_ceilings
from benchmarks.offline import run_jobs
from benchmarks.workload import random_jobs
from engine.contract.engine_config import EngineConfig
from engine.contract.messages import EngineRequest
from engine.contract.sampling_params import SamplingParams
from engine.core.engine_core import EngineCore

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
GOALS = {"one stream": 0.90, "prefill": 0.75, "host share": 0.05, "sampling share": 0.05}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is run.

    Attributes:
        shape: of the model, as in its config.json.
        streams: at once; prompt, output: tokens of each of them.
        prefill: tokens of the long prompt.
        one_output: tokens of the single stream.
    """

    shape: dict[str, Any]
    device: str = "cuda"
    dtype: str = "bfloat16"
    streams: int = 256
    prompt: int = 128
    output: int = 64
    prefill: int = 8192
    one_output: int = 128


def smoke_sizes() -> Sizes:
    """Everything in small, on what there is."""
    small = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
        "max_position_embeddings": 256,
    }  # fmt: skip
    cuda = torch.cuda.is_available()
    return Sizes(
        {**SHAPE, **small}, "cuda" if cuda else "cpu", "bfloat16" if cuda else "float32",
        streams=3, prompt=8, output=6, prefill=64, one_output=8,
    )  # fmt: skip


def decode_seconds(core: EngineCore, batch: int, input_len: int, output_len: int) -> float:
    """Median time of a step in which all sequences decode, after a warm-up run."""
    vocab = core.facts.vocab_size
    steps: list[float] = []
    for seed in range(2):
        core.reset_prefix_cache()
        lengths = (input_len, input_len), (output_len, output_len)
        steps = run_jobs(core, random_jobs(batch, vocab, *lengths, seed=seed))["steps"]
    # The last steps are decodes of all: prompts come first, and all end together.
    return statistics.median(steps[-output_len // 2 :])


def idle_share(core: EngineCore, sizes: Sizes) -> float:
    """The part of a run's time in which the device computes nothing, by torch's profiler.

    An upper bound of what the host costs a step: the profiler's own work counts as well.
    """
    lengths = (16, 16), (sizes.one_output, sizes.one_output)
    jobs = random_jobs(sizes.streams, core.facts.vocab_size, *lengths, seed=3)
    core.reset_prefix_cache()
    kinds = torch.profiler.ProfilerActivity
    activity = kinds.CUDA if sizes.device == "cuda" else kinds.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        wall = run_jobs(core, jobs)["seconds"]
    busy = sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6
    return max(0.0, 1 - busy / wall)


def sampling_seconds(core: EngineCore, sizes: Sizes) -> float:
    """Median time of the kernels that choose a token of random logits for all streams."""
    [ops] = core.executor.collective_rpc(lambda worker: worker.kernels)
    vocab = core.facts.vocab_size
    device = ops.device
    logits = torch.randn(sizes.streams, vocab, device=device)

    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((sizes.streams,), value, dtype=dtype, device=device)

    settings = (
        column(0.8, torch.float32), column(vocab, torch.int64), column(0.9, torch.float64),
        column(0.0, torch.float64), torch.rand(sizes.streams, dtype=torch.float64, device=device),
    )  # fmt: skip
    return seconds_of(lambda: ops.sample(logits, *settings), sizes.device)


def seconds_of(run: Callable[[], object], device: str) -> float:
    """Median time of something; on a GPU in a graph, so that nothing waits for the host."""
    if device == "cuda":
        return graphed_seconds(run)
    run()
    times = []
    for _ in range(3):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def engine_rows(folder: Path, ceilings: GpuCeilings, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Decode of one stream and of many, with and without graphs, and a long prompt."""
    step_of: dict[str, float] = {}
    tokens_of: dict[str, list[int]] = {}
    for how in ("graphs", "eager"):
        core = _core(folder, sizes, how == "eager")
        one = decode_seconds(core, 1, 16, sizes.one_output)
        moved = core.facts.decode_bytes
        yield {
            "figure": f"one stream, {how}", "tok_s": round(1 / one, 1),
            "of_copy": round(moved / one / ceilings.copy, 3), "goal": GOALS["one stream"],
        }  # fmt: skip
        many = step_of[how] = decode_seconds(core, sizes.streams, sizes.prompt, sizes.output)
        yield {
            "figure": f"{sizes.streams} streams, {how}", "tok_s": round(sizes.streams / many),
            "step_ms": round(many * 1e3, 3), "host_share": round(idle_share(core, sizes), 3),
            "goal": GOALS["host share"],
        }  # fmt: skip
        tokens_of[how] = _greedy_tokens(core, sizes)
        if how == "graphs":
            yield _prefill_row(core, ceilings, sizes)
            chosen = sampling_seconds(core, sizes)
            yield {
                "figure": f"sampling of {sizes.streams}", "us": round(chosen * 1e6, 1),
                "of_step": round(chosen / many, 3), "goal": GOALS["sampling share"],
            }  # fmt: skip
        del core
        gc.collect()
        torch.cuda.empty_cache()
    same = [a == b for a, b in zip(tokens_of["graphs"], tokens_of["eager"], strict=True)]
    yield {
        "figure": f"{sizes.streams} streams, eager / graphs",
        "ratio": round(step_of["eager"] / step_of["graphs"], 2),
        "same_tokens": round(sum(same) / len(same), 3),
    }


def _greedy_tokens(core: EngineCore, sizes: Sizes) -> list[int]:
    """What one stream says: graphs must say the same as no graphs."""
    core.reset_prefix_cache()
    length = sizes.one_output
    job = random_jobs(1, core.facts.vocab_size, (16, 16), (length, length), seed=9)[0]
    core.add_request(
        EngineRequest(
            request_id="said", gateway_id="", prompt_token_ids=job.prompt_token_ids,
            sampling=SamplingParams(temperature=0, max_tokens=length, ignore_eos=True),
        )
    )  # fmt: skip
    tokens: list[int] = []
    while core.has_work:
        tokens += [token for delta in core.step() for token in delta.token_ids]
    return tokens


def _prefill_row(core: EngineCore, ceilings: GpuCeilings, sizes: Sizes) -> dict[str, Any]:
    [spec] = core.executor.collective_rpc(lambda worker: worker.loaded.spec)
    tokens, shape = sizes.prefill, sizes.shape
    seconds = []
    for seed in range(4):
        core.reset_prefix_cache()
        job = random_jobs(1, spec.vocab_size, (tokens, tokens), (1, 1), seed=seed)
        seconds.append(run_jobs(core, job)["seconds"])
    typical = statistics.median(seconds[1:])
    rate = prefill_flops(shape, tokens) / typical
    return {
        "figure": f"prefill of {tokens}", "tok_s": round(tokens / typical),
        "of_matmul": round(rate / ceilings.matmul, 3), "goal": GOALS["prefill"],
    }  # fmt: skip


def prefill_flops(shape: dict[str, Any], tokens: int) -> float:
    """Of every layer's products, and of attention over half of the square. The embedding is none,
    and the head works on the last token alone.
    """
    hidden, inner, layers = (
        shape[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    kv = hidden * shape["num_key_value_heads"] / shape["num_attention_heads"]
    weights = layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner)
    # Two products of [tokens, tokens] with all heads, of which the mask leaves a half.
    return float(2 * weights * tokens + layers * 2 * hidden * tokens**2)


def transformers_row(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """`transformers` generate on the same shape, one stream."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device(sizes.device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, sizes.dtype))
    ids = torch.randint(4, sizes.shape["vocab_size"], (1, 16), device=sizes.device)
    few, times = sizes.one_output // 4, []
    for count in (few, few, few + sizes.one_output):
        _settle(sizes)
        started = time.perf_counter()
        model.generate(ids, min_new_tokens=count, max_new_tokens=count, do_sample=False)
        _settle(sizes)
        times.append(time.perf_counter() - started)
    rate = sizes.one_output / max(times[2] - times[1], 1e-9)
    return {"figure": "transformers, one stream", "tok_s": round(rate, 1)}


def _settle(sizes: Sizes) -> None:
    if sizes.device == "cuda":
        torch.cuda.synchronize()


def _core(folder: Path, sizes: Sizes, eager: bool) -> EngineCore:
    longest = max(sizes.prefill, sizes.prompt) + max(sizes.output, sizes.one_output)
    return EngineCore(
        EngineConfig(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=sizes.dtype,
            device=sizes.device,
            max_model_len=longest + 16,
            max_num_seqs=sizes.streams,
            enforce_eager=eager,
        )
    )


def _ceilings(sizes: Sizes) -> GpuCeilings:
    """What the device can do; of a CPU, a rough word."""
    if sizes.device == "cuda":
        return measure_ceilings()
    source, square = torch.ones(1 << 22), torch.randn(256, 256)
    copy = seconds_of(source.clone, sizes.device)
    product = seconds_of(lambda: square @ square, sizes.device)
    return GpuCeilings(2 * source.nbytes / copy, 2 * 256**3 / product)


def run(
    write: Callable[[str], object] = print, transformers: bool = True, sizes: Sizes | None = None
) -> None:
    """Write a JSON object a figure, after one with the ceilings."""
    sizes = sizes or Sizes(SHAPE)
    ceilings = _ceilings(sizes)
    write(json.dumps({"copy_gb_s": ceilings.copy / 1e9, "matmul_tflop_s": ceilings.matmul / 1e12}))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(sizes.shape), encoding="utf-8")
        for row in engine_rows(folder, ceilings, sizes):
            write(json.dumps(row))
        if transformers:
            write(json.dumps(transformers_row(folder, sizes)))


def run_kernels(write: Callable[[str], object] = print) -> None:
    """The kernels' table, then the model's figures."""
    kernel_bench.run(write)
    run(write)


def main() -> int:
    """Print the figures; 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--no-transformers", action="store_true", help="skip the comparison")
    parser.add_argument("--smoke", action="store_true", help="everything in small, on any device")
    options = parser.parse_args()
    if options.smoke:
        run(transformers=not options.no_transformers, sizes=smoke_sizes())
        return 0
    if not torch.cuda.is_available():
        print("torch sees no CUDA device.", file=sys.stderr)
        return 2
    run(transformers=not options.no_transformers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
