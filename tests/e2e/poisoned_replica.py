"""A real replica that dies in each step that holds a request with the seed `POISON`.

In the place of `python -m engine.serving`, as a request would kill it that makes a kernel write
where it mustn't. With each such death a line is written into the file `QUIRE_TEST_DEATHS`.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import engine.serving.__main__ as serving  # first: the collector rests while it's imported
from engine.core.steps_in_flight import StepsInFlight
from engine.scheduler import StepPlan

POISON = 66613


def poison() -> None:
    """Have the engine die of it."""
    execute = StepsInFlight._execute
    poisoned: set[int] = set()

    def deadly(steps: StepsInFlight, plan: StepPlan) -> Any:
        poisoned.update(new.seq_id for new in plan.new if new.sampling.seed == POISON)
        if poisoned.intersection(plan.seq_ids):
            with open(os.environ["QUIRE_TEST_DEATHS"], "a", encoding="utf-8") as deaths:
                deaths.write(f"{len(plan.seq_ids)}\n")
            os.kill(os.getpid(), signal.SIGSEGV)
        return execute(steps, plan)

    StepsInFlight._execute = deadly  # type: ignore[assignment,method-assign]


if __name__ == "__main__":
    poison()
    sys.exit(serving.main())
