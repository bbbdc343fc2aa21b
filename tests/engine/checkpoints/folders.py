"""Model folders whose linear layers are quantized, beside plain ones that stand for the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.checkpoints.writers import Writer, mxfp4

FILE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Pair:
    """`packed` is quantized; `dense` has the float32 weights that it stands for, by `weights`."""

    packed: Path
    dense: Path
    weights: dict[str, Tensor]


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def make_pair(
    source: Path,
    target: Path,
    config: dict[str, Any],
    write: Writer,
    chosen: Callable[[str], bool] = is_linear,
    header: dict[str, str] | None = None,
) -> Pair:
    """Both folders within `target`, from a plain float32 one."""
    packed = shutil.copytree(source, target / "packed")
    baseline = shutil.copytree(source, target / "plain")
    tensors, weights, words = {}, {}, {"format": "pt"}
    full_file = load_file(source / FILE)
    for name, tensor in list(full_file.items()):
        if not chosen(name):
            tensors[name] = tensor
            continue
        module = name.removesuffix(".weight")
        parts, stands_for = write(tensor)
        tensors |= {
            f"{module}.{part}": retained_part.contiguous() for part, retained_part in parts.items()
        }
        full_file[name] = weights[module] = stands_for.contiguous()
        words |= {f"{module}.{key}": word for key, word in (header or {}).items()}
    save_file(tensors, packed / FILE, metadata=words)
    save_file(full_file, baseline / FILE, metadata={"format": "pt"})
    raw = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**raw, "quantization_config": config}))
    return Pair(packed, baseline, weights)


def make_mxfp4(source: Path, target: Path) -> Pair:
    """The same of a gpt-oss, whose experts alone are packed."""
    packed = shutil.copytree(source, target / "packed")
    baseline = shutil.copytree(source, target / "plain")
    tensors, weights = {}, {}
    full_file = load_file(source / FILE)
    for name, tensor in list(full_file.items()):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            parts, stands_for = mxfp4(tensor.transpose(1, 2).contiguous())
            full_file[name] = weights[name] = stands_for.transpose(1, 2).contiguous()
            tensors |= {
                name + part: retained_part.contiguous() for part, retained_part in parts.items()
            }
        else:
            tensors[name] = tensor
    assert weights
    save_file(tensors, packed / FILE, metadata={"format": "pt"})
    save_file(full_file, baseline / FILE, metadata={"format": "pt"})
    raw = json.loads((packed / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4"}
    (packed / "config.json").write_text(json.dumps(raw))
    return Pair(packed, baseline, weights)
