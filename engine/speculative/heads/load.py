"""From a folder to `Heads`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.models.architectures import read_config
from engine.models.formats import read_pt
from engine.models.weights import INDEX_NAME, WeightReader
from engine.speculative.heads.heads import Heads
from engine.speculative.heads.medusa import Medusa
from engine.speculative.heads.mlp import MlpSpeculator
from engine.speculative.heads.source import HeadSource
from kernels import KernelSet

log = logging.getLogger(__name__)

METHODS: dict[str, Callable[[HeadSource], Heads]] = {
    "medusa": Medusa,
    "mlp_speculator": MlpSpeculator,
}
#: What Medusa's authors name the file of the heads.
_MEDUSA_FILE = "medusa_lm_head.safetensors"


def method_of(config: dict[str, Any]) -> str:
    """What a checkpoint's config.json says that it is, by the method's name; "": no heads."""
    if "medusa_num_heads" in config:
        return "medusa"
    kind = config.get("model_type")
    return kind if isinstance(kind, str) and kind in (*METHODS, "eagle", "eagle3") else ""


def load_heads(
    method: str,
    folder: Path,
    sizes: tuple[int, int],
    ops: KernelSet,
    dtype: torch.dtype,
    quantization: str | None = None,
) -> Heads:
    """The heads of a folder. `sizes`: the model's hidden size and vocabulary.

    Raises `ModelLoadError` for a checkpoint that isn't whole, or is another model's.
    """
    config, weights = read_config(folder), _weights(folder)
    source = HeadSource(folder, config, weights, *sizes, ops, dtype, quantization)
    heads = METHODS[method](source)
    if unread := weights.unread():
        log.warning("%d tensors of the heads weren't used: %s", len(unread), unread[:5])
    weights.close()
    log.info("%s: %d heads, %d MB", method, heads.most, heads.nbytes >> 20)
    return heads


def _weights(folder: Path) -> WeightReader:
    """The folder's tensors: safetensors first, then PyTorch's files, of tensors alone."""
    if (folder / _MEDUSA_FILE).is_file():
        return WeightReader(folder, [folder / _MEDUSA_FILE])
    if (folder / "model.safetensors").is_file() or (folder / INDEX_NAME).exists():
        return WeightReader(folder)
    if any(folder.glob("*.pt")) or any(folder.glob("*.bin")):
        return read_pt(folder)
    return WeightReader(folder)  # which says what is missing
