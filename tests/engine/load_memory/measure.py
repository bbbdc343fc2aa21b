"""The memory that loads take, in bytes, a line of JSON each: arguments are models and dtypes.

Each load has a process of its own, forked from one that has imported everything: what an earlier
load left in the heap would hide what this one needs.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import torch

import kernels
from engine.contract.engine_config import QUANTIZATIONS, EngineConfig
from engine.model_loader.loader import LoadedModel, load_model

DEMO = Path(__file__).parents[3] / "demo" / "model"


def memory(name: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def load(model: str, weights: str) -> LoadedModel:
    """The model, without its tokenizer; `weights` is a quantization or a dtype."""
    rounded = weights in QUANTIZATIONS
    config = EngineConfig(
        model=model,
        skip_tokenizer_init=True,
        quantization=weights if rounded else None,
        dtype="auto" if rounded else weights,
    )
    return load_model(config, kernels.get("cpu"), lambda done, total: None)


def measure_load(model: str, weights: str) -> dict[str, int]:
    """What this process needs for a load beyond what it has already, and what comes of it."""
    load(str(DEMO), "int8")  # touches what a load needs of libraries
    initial_memory = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    loaded = load(model, weights)
    peak, after = memory("VmHWM"), memory("VmRSS")
    engine = loaded.model
    tables = {id(table): table.nbytes for table in (engine.embedding, engine.lm_head)}
    layers = engine.decode_bytes - engine.lm_head.nbytes
    size = layers + sum(tables.values())
    return {"peak": peak - initial_memory, "final": after - initial_memory, "weights": size}


def in_a_child(model: str, weights: str) -> None:
    """Print what a forked process says."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            print(json.dumps(measure_load(model, weights)), flush=True)
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise RuntimeError(f"{model} as {weights} doesn't load")


def main() -> None:
    """Load each."""
    torch.set_num_threads(1)
    load(str(DEMO), "int8")  # imports what a load needs
    for model, weights in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        in_a_child(model, weights)


if __name__ == "__main__":
    main()
