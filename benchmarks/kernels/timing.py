"""Medians of many short runs, of variants that take turns."""

from __future__ import annotations

import time
from collections.abc import Callable

PAUSE_S = 0.01

Run = Callable[[int], object]
"""One run of a kernel; the argument counts runs, so that it can use other data each time."""


def medians(variants: dict[str, Run], seconds: float) -> dict[str, float]:
    """Median seconds of each variant.

    They take turns, so that whatever else the machine does meets all of them alike, with a pause in
    between, in which the idle threads of torch's pool stop spinning. Each runs at least five times,
    and until `seconds` have gone by for all together.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    for run in variants.values():
        run(0)
    end = time.perf_counter() + seconds
    turn = 0
    while turn < 5 or time.perf_counter() < end:
        turn += 2
        for name, run in variants.items():
            time.sleep(PAUSE_S)
            run(turn)  # what went to sleep in the pause wakes up
            started = time.perf_counter()
            run(turn + 1)
            times[name].append(time.perf_counter() - started)
    return {name: sorted(samples)[len(samples) // 2] for name, samples in times.items()}
