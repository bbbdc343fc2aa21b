"""The demo model in a larger shape that says the same: real text at a real model's cost.

    python -m demo.widen DIR [--factor 16] [--layers N] [--model DIR]

An EAGLE head of it can be widened as well, and then goes with the widened model.
Widths are multiplied and what is new is zero, so every product reads as many bytes as a model of
that shape and gives what the small one's gives. Norms divide by a mean over more elements, which
their weights and `rms_norm_eps` make up for; exactly where the factor is a power of four. Layers
beyond the model's own are copies of these that add nothing: so a head that is one layer is as small
beside it as beside models that have so many.
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


def widen(model: Path, folder: Path, factor: int, layers: int = 0) -> None:
    """Write a checkpoint of `model`'s function, `factor` times as wide, of `layers` layers; 0: as
    many as it has.

    Raises ValueError unless the factor is a power of four, and for fewer layers than it has.
    """
    if factor < 4 or math.isqrt(factor) ** 2 != factor or factor & (factor - 1):
        raise ValueError(f"the factor must be 4, 16, 64 ...; got {factor}")
    config = json.loads((model / "config.json").read_text())
    hidden, own = config["hidden_size"], config["num_hidden_layers"]
    layers = layers or own
    if layers < own:
        raise ValueError(f"the model has {own} layers; got {layers}")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: _widened(name, tensor, factor, hidden)
        for name, tensor in load_file(model / "model.safetensors").items()
    }
    for layer in range(own, layers):
        tensors |= _idle(tensors, f"model.layers.{layer % own}.", f"model.layers.{layer}.")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config |= {name: config[name] * factor for name in WIDENED} | {"num_hidden_layers": layers}
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


def _idle(tensors: dict[str, Tensor], like: str, prefix: str) -> dict[str, Tensor]:
    """A layer that adds nothing to what it's given."""
    found = {
        prefix + name.removeprefix(like): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(like)
    }
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        found[prefix + name].zero_()
    return found


def main() -> None:
    """Write it."""
    parser = argparse.ArgumentParser(prog="python -m demo.widen", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--factor", type=int, default=16)
    parser.add_argument("--layers", type=int, default=0, help="0: as many as the model has")
    parser.add_argument("--model", type=Path, default=HERE / "model")
    args = parser.parse_args()
    widen(args.model, args.folder, args.factor, args.layers)


if __name__ == "__main__":
    main()
