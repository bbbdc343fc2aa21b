"""`python -m benchmarks.kernels`: each kernel's time and how near it comes to the machine's
limits."""

from __future__ import annotations

import argparse
import os

import torch

from benchmarks.kernels.cases import SUITES, Case
from benchmarks.kernels.ceilings import Ceilings, measure
from benchmarks.kernels.timing import medians
from kernels.cpu import CpuKernels
from kernels.cpu.library import Library


def main() -> None:
    """Run the chosen suites and print a table."""
    arguments = _arguments()
    kernels, library = CpuKernels(arguments.isa), Library(arguments.isa)
    print(f"{kernels.name}: {kernels.why}")
    kernels.use_threads(arguments.threads)
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} threads; load {os.getloadavg()[0]:.1f}")
    for name in arguments.suites:
        ceilings = measure(library)
        read, flops = ceilings.read / 1e9, ceilings.flops / 1e9
        print(f"\n{name}: ceilings {read:.1f} GB/s read, {flops:.0f} GFLOP/s float32")
        print(f"{'op':18} {'shape':32} {'ms':>9} {'GB/s':>6} {'GFLOP/s':>8} {'limit':>6} torch ms")
        for case in SUITES[name](kernels):
            times = medians(case.variants, arguments.seconds)
            print(_line(case, times, ceilings), flush=True)


def _line(case: Case, times: dict[str, float], ceilings: Ceilings) -> str:
    seconds = times["quire"]
    rate, work = case.bytes / seconds, case.flops / seconds
    limit = max(rate / ceilings.read, work / ceilings.flops)
    torchs = f"{times['torch'] * 1e3:9.3f}" if "torch" in times else "        -"
    gigabytes = f"{rate / 1e9:6.1f}" if case.bytes else "     -"
    gigaflops = f"{work / 1e9:8.0f}" if case.flops else "       -"
    return (
        f"{case.op:18} {case.shape:32} {seconds * 1e3:9.3f} {gigabytes} {gigaflops} "
        f"{limit:6.0%} {torchs}"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="suite", help=f"of {', '.join(SUITES)}")
    parser.add_argument("--isa", help="instruction set; default: the best")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=0.5, help="for each row of the table")
    arguments = parser.parse_args()
    arguments.suites = arguments.suites or list(SUITES)
    for name in arguments.suites:
        if name not in SUITES:
            parser.error(f"there is no suite {name}; there are {', '.join(SUITES)}")
    return arguments


if __name__ == "__main__":
    main()
