"""Draft heads on the model's last hidden states, read from their published checkpoint layouts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.checkpoints.safetensors import WeightReader, has_safetensors
from engine.checkpoints.torch_files import read_pt
from engine.models.registry import read_config
from engine.speculative.heads.base import DraftHeads, HeadCheckpoint
from engine.speculative.heads.eagle import Eagle, Eagle3
from engine.speculative.heads.layer import LayerDraftHeads, TargetModel
from engine.speculative.heads.medusa import Medusa
from engine.speculative.heads.mlp_speculator import MlpSpeculator
from kernels import KernelSet

log = logging.getLogger(__name__)

METHODS: dict[str, Callable[[HeadCheckpoint], DraftHeads]] = {
    "medusa": Medusa,
    "mlp_speculator": MlpSpeculator,
}
LAYER_METHODS: dict[str, Callable[[HeadCheckpoint, TargetModel], LayerDraftHeads]] = {
    "eagle": Eagle,
    "eagle3": Eagle3,
}
#: Keys of config.json that contain the layer's config: vLLM's EAGLEConfig, the speculators library.
_NESTED = ("model", "transformer_layer_config")
#: File name of the heads in the original Medusa checkpoints.
_MEDUSA_FILE = "medusa_lm_head.safetensors"


def method_of(config: dict[str, Any], name: str) -> str:
    """Return the method that a checkpoint's config.json names; "" if it has no heads.

    Original EAGLE checkpoints name it only in `name`.
    """
    if "medusa_num_heads" in config:
        return "medusa"
    architectures, last = "".join(config.get("architectures") or []), Path(name).name.lower()
    if "draft_vocab_size" in config or "eagle3" in architectures.lower() or "eagle3" in last:
        return "eagle3"
    for kind in (config.get("speculators_model_type"), config.get("model_type")):
        if kind in (*METHODS, *LAYER_METHODS):
            return str(kind)
    return "eagle" if "eagle" in architectures.lower() or "eagle-" in last else ""


def load_heads(
    method: str,
    folder: Path,
    sizes: tuple[int, int],
    ops: KernelSet,
    dtype: torch.dtype,
    quantization: str | None = None,
) -> DraftHeads:
    """Load the heads of a folder. `sizes`: the model's hidden size and vocabulary.

    Raises `ModelLoadError` if the checkpoint is incomplete or for another model.
    """
    config, weights = read_config(folder), _weights(folder)
    source = HeadCheckpoint(folder, config, weights, *sizes, ops, dtype, quantization)
    heads = METHODS[method](source)
    log.info("%s: %d heads, %d MB", method, heads.max_drafts, heads.nbytes >> 20)
    _close(source)
    return heads


def load_layer_heads(
    method: str,
    folder: Path,
    target: TargetModel,
    ops: KernelSet,
    dtype: torch.dtype,
    quantization: str | None = None,
) -> LayerDraftHeads:
    """Load heads that consist of a decoder layer."""
    config, weights = read_config(folder), _weights(folder)
    for name in _NESTED:
        if isinstance(nested := config.get(name), dict):
            config = {**nested, **config}
    source = HeadCheckpoint(folder, config, weights, *target.sizes, ops, dtype, quantization)
    heads = LAYER_METHODS[method](source, target)
    log.info("%s: a layer of %d MB", method, heads.nbytes >> 20)
    _close(source)
    return heads


def _close(source: HeadCheckpoint) -> None:
    """Check that no required tensor is left unread."""
    if unread := source.weights.unused_names():
        log.warning("%d tensors of the heads weren't used: %s", len(unread), unread[:5])
    source.weights.close()


def _weights(folder: Path) -> WeightReader:
    """Open the folder's tensors: safetensors first, then PyTorch's files with tensors only."""
    if (folder / _MEDUSA_FILE).is_file():
        return WeightReader(folder, [folder / _MEDUSA_FILE])
    if has_safetensors(folder):
        return WeightReader(folder)
    if any(folder.glob("*.pt")) or any(folder.glob("*.bin")):
        return read_pt(folder)
    return WeightReader(folder)  # raises an error that says what is missing
