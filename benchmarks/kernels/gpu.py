"""`python -m benchmarks.kernels.gpu`: the GPU kernels beside what the GPU can do, in one run.

Every case is checked against the plain torch reference on fresh random inputs first. Times are
medians by CUDA events of a CUDA graph's replays, with the L2 cache overwritten before each;
ceilings are a 2 GiB copy and an 8192 x 8192 bf16 product of the same run. `--smoke` runs all of it
in small, on a CPU (with TRITON_INTERPRET=1) where there's no GPU, to see that it works.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.kernels.device_timing import GpuCeilings, graphed_seconds, measure_ceilings
from benchmarks.kernels.gpu_case import GpuCase
from benchmarks.kernels.gpu_cases import all_cases
from kernels.triton import load
from kernels.triton.launch import no_device


def row_of(case: GpuCase, seconds: float, ceilings: GpuCeilings) -> dict[str, Any]:
    """The figures of one case."""
    rate, work = case.bytes / seconds, case.flops / seconds
    share = max(rate / ceilings.copy, work / ceilings.matmul)
    return {
        "op": case.op,
        "shape": case.shape,
        "us": round(seconds * 1e6, 1),
        "gb_s": round(rate / 1e9),
        "tflop_s": round(work / 1e12, 1),
        "of_ceiling": round(share, 3),
        "goal": case.goal,
    }


def run(
    write: Callable[[str], object] = print,
    as_json: bool = False,
    only: str = "",
    smoke: bool = False,
) -> bool:
    """Time all cases whose names hold `restricted_flag`; whether every goal was reached.

    `smoke`: all of it in small and on a CPU where there's no GPU, in Triton's interpreter; the
    times mean nothing.
    """
    device = "cpu" if smoke and not torch.cuda.is_available() else "cuda"
    sizes = {"copied": 1 << 20, "size": 64} if smoke else {}
    ops, ceilings = load(device), measure_ceilings(**sizes, device=device)
    name = torch.cuda.get_device_name() if device == "cuda" else "smoke test on a CPU"
    write(
        f"{name}, torch {torch.__version__}, {ops.name}: {ops.why}; ceilings: copy "
        f"{ceilings.copy / 1e9:.0f} GB/s, bf16 product {ceilings.matmul / 1e12:.1f} TFLOP/s"
    )
    if not as_json:
        write("| op | shape | us | GB/s | TFLOP/s | of ceiling | goal |")
        write("|---|---|---|---|---|---|---|")
    good, has_cases = True, False
    for case in all_cases(ops, small=smoke):
        if only not in case.op:
            continue
        has_cases = True
        case.check()
        row = row_of(case, graphed_seconds(case.run, device), ceilings)
        good &= row["of_ceiling"] >= case.goal
        write(json.dumps(row) if as_json else _line(row))
    if not has_cases:
        write(f"No case's name holds {only!r}.")
    return good and has_cases


def _line(row: dict[str, Any]) -> str:
    goal = f"{row['goal']:.0%}" if row["goal"] else ""
    gigabytes, teraflops = row["gb_s"] or "", row["tflop_s"] or ""
    return (
        f"| {row['op']} | {row['shape']} | {row['us']} | {gigabytes} | {teraflops} "
        f"| {row['of_ceiling']:.0%} | {goal} |"
    )


def main() -> int:
    """Print the table; 2 without a GPU, 1 where a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels.gpu", description=__doc__)
    parser.add_argument("--json", action="store_true", help="a JSON object a line")
    parser.add_argument("--only", default="", help="cases whose names hold this")
    parser.add_argument("--smoke", action="store_true", help="everything in small, on any device")
    options = parser.parse_args()
    obstacle = no_device(interpreted=options.smoke)
    if obstacle:
        print(obstacle, file=sys.stderr)
        return 2
    return 0 if run(as_json=options.json, only=options.only, smoke=options.smoke) else 1


if __name__ == "__main__":
    sys.exit(main())
