"""One engine of an ablation in a process of its own: `python -m engine.bench.ablations.worker`.

Reads a JSON object with `config` and `sizes` from its standard input and answers with what the
engine is, then does a load for each line with its name and a seed, and answers with its figure.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, TextIO

from engine.bench.ablations.loads import LOADS, Sizes
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import QuireError
from engine.warmup import warm_up


def facts_of(core: EngineCore) -> dict[str, Any]:
    """The fields of `parts.Facts`."""
    spec = core.loaded.spec
    return {
        "kernels": core.executor.kernels.name,
        "dtype": str(core.loaded.dtype).removeprefix("torch."),
        "quantization": core.config.quantization,
        "experts": getattr(spec, "moe", None) is not None,
        "gated": bool(getattr(spec, "gated", False)),
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
    # What libraries print must not come between the answers.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as pipe:
        os.dup2(2, 1)
        serve(sys.stdin, pipe)
