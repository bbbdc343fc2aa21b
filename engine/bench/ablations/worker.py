"""One engine of an ablation in a process of its own: `python -m engine.bench.ablations.worker`.

Reads a JSON object with `config` and `sizes` from its standard input and answers with what the
engine is, then does a load for each line with its name and a seed, and answers with its figure.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any, TextIO

# As where a replica begins: what is imported stays.
if __name__ == "__main__":
    gc.disable()

from engine.bench.ablations.loads import LOADS, Sizes
from engine.contract.config import EngineConfig
from engine.contract.errors import QuireError
from engine.core.engine_core import EngineCore
from engine.executor.factory import in_process
from engine.serving.warmup import warm_up


def facts_of(core: EngineCore) -> dict[str, Any]:
    """The fields of `parts.Facts`."""
    executor = in_process(core.executor)
    spec = executor.loaded.spec
    return {
        "kernels": executor.kernels.name,
        "dtype": core.facts.dtype,
        "quantization": core.config.quantization,
        "experts": getattr(spec, "moe", None) is not None,
    }


def serve(lines: TextIO, answers: TextIO) -> None:
    """Answer until there are no more lines."""

    def answer(found: dict[str, Any]) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    told = json.loads(lines.readline())
    try:
        core = EngineCore(EngineConfig.from_mapping(told["config"]))
        warm_up(core)
    except QuireError as error:
        answer({"error": error.message})
        return
    answer(facts_of(core))
    sizes = Sizes(**told["sizes"])
    for line in lines:
        name, seed = line.split()
        answer({"figure": LOADS[name].run(core, sizes, int(seed))})


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    # What libraries print must not come between the answers.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as pipe:
        os.dup2(2, 1)
        serve(sys.stdin, pipe)
