"""Heads that go on from the model's last hidden state, in their published checkpoint layouts."""

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
#: Where a config.json keeps the layer's own: vLLM's EAGLEConfig, the speculators library's.
_NESTED = ("model", "transformer_layer_config")
#: What Medusa's authors name the file of the heads.
_MEDUSA_FILE = "medusa_lm_head.safetensors"


def method_of(config: dict[str, Any], name: str) -> str:
    """What a checkpoint's config.json says that it is, by the method's name; "": no heads.

    EAGLE's authors say it in the checkpoint's `name` alone.
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
    """The heads of a folder. `sizes`: the model's hidden size and vocabulary.

    Raises `ModelLoadError` for a checkpoint that isn't whole, or is another model's.
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
    """The same of heads that are a layer."""
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
    """All that is needed was read."""
    if unread := source.weights.unused_names():
        log.warning("%d tensors of the heads weren't used: %s", len(unread), unread[:5])
    source.weights.close()


def _weights(folder: Path) -> WeightReader:
    """The folder's tensors: safetensors first, then PyTorch's files, of tensors alone."""
    if (folder / _MEDUSA_FILE).is_file():
        return WeightReader(folder, [folder / _MEDUSA_FILE])
    if has_safetensors(folder):
        return WeightReader(folder)
    if any(folder.glob("*.pt")) or any(folder.glob("*.bin")):
        return read_pt(folder)
    return WeightReader(folder)  # which says what is missing
