"""The memory that a load takes, in bytes, as JSON: arguments are a folder and its weights' form.


Run in a process of its own: the system's high-water mark counts everything since its start.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from engine.config import QUANTIZATIONS, EngineConfig
from engine.models.loader import LoadedModel, load_model

DEMO = Path(__file__).parents[3] / "demo" / "model"


def memory(name: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def load(folder: str, weights: str) -> LoadedModel:
    """The model, without its tokenizer; `weights` is a quantization or a dtype."""
    rounded = weights in QUANTIZATIONS
    config = EngineConfig(
        model=folder,
        skip_tokenizer_init=True,
        quantization=weights if rounded else None,
        dtype="auto" if rounded else weights,
    )
    return load_model(config, lambda done, total: None)


def main() -> None:
    """Load and tell."""
    folder, weights = sys.argv[1:]
    torch.set_num_threads(1)
    load(str(DEMO), "int8")  # imports what a load needs
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    loaded = load(folder, weights)
    peak, after = memory("VmHWM"), memory("VmRSS")
    told = {
        "peak": peak - before,
        "final": after - before,
        "weights": loaded.model.decode_bytes + loaded.model.embedding.nbytes,
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
