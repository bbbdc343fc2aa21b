"""The demo model in a larger shape that says the same: real text at a real model's cost.

    python -m demo.widen DIR [--factor 16] [--model DIR]

An EAGLE head of it can be widened as well, and then goes with the widened model.
Widths are multiplied and what is new is zero, so every product reads as many bytes as a model of
that shape and gives what the small one's gives. Norms divide by a mean over more elements, which
their weights and `rms_norm_eps` make up for; exactly where the factor is a power of four.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

HERE = Path(__file__).parent
WIDENED = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
)  # fmt: skip


def widen(model: Path, folder: Path, factor: int) -> None:
    """Write a checkpoint of `model`'s function, `factor` times as wide.

    Raises ValueError unless the factor is a power of four.
    """
    if factor < 4 or math.isqrt(factor) ** 2 != factor or factor & (factor - 1):
        raise ValueError(f"the factor must be 4, 16, 64 ...; got {factor}")
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    hidden = config["hidden_size"]
    tensors = {
        name: _widened(name, tensor, factor, hidden)
        for name, tensor in load_file(model / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config |= {name: config[name] * factor for name in WIDENED}
    config["rms_norm_eps"] /= factor
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for file in model.glob("*.json"):
        if not (folder / file.name).exists():
            shutil.copy(file, folder)


def _widened(name: str, tensor: Tensor, factor: int, hidden: int) -> Tensor:
    if tensor.dim() == 1:
        scaled = torch.zeros(len(tensor) * factor, dtype=tensor.dtype)
        scaled[: len(tensor)] = tensor / math.sqrt(factor)
        return scaled
    if name == "fc.weight":  # an EAGLE head's, over an embedding and a state
        parts = tensor.split(hidden, dim=1)
        return torch.cat([_widened("", part, factor, hidden) for part in parts], dim=1)
    rows, columns = tensor.shape
    embeds = "embed_tokens" in name or "lm_head" in name
    wide = torch.zeros(rows if embeds else rows * factor, columns * factor, dtype=tensor.dtype)
    wide[:rows, :columns] = tensor
    return wide


def main() -> None:
    """Write it."""
    parser = argparse.ArgumentParser(prog="python -m demo.widen", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--factor", type=int, default=16)
    parser.add_argument("--model", type=Path, default=HERE / "model")
    args = parser.parse_args()
    widen(args.model, args.folder, args.factor)


if __name__ == "__main__":
    main()
