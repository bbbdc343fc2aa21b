"""Adapters as PEFT saves them, small and random, for tests to serve or to spoil."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.contract.lora import CONFIG_FILE, NEW_TOKENS_FILE, WEIGHTS_FILE

DEMO_MODEL = "demo/model"
PIRATE = Path("demo/adapters/pirate")


def write_adapter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """The two files of an adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS_FILE
    )
    return folder


def pirate() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The demo's pirate, to be changed."""
    config = json.loads((PIRATE / CONFIG_FILE).read_text(encoding="utf-8"))
    return config, load_file(PIRATE / WEIGHTS_FILE)


def demo_adapter(folder: Path, rows: int) -> Path:
    """The demo's pirate with tokens of its own."""
    write_adapter(folder, *pirate())
    generator = torch.Generator().manual_seed(0)
    hidden = json.loads(Path(DEMO_MODEL, "config.json").read_text())["hidden_size"]
    some = torch.randn(rows, hidden, generator=generator)
    save_file(
        {"input_embeddings": some, "output_embeddings": some.clone()}, folder / NEW_TOKENS_FILE
    )
    return folder


def first_a(tensors: Mapping[str, Tensor]) -> str:
    """The name of one of an adapter's tensors."""
    return next(name for name in tensors if name.endswith("lora_A.weight"))


def zeros(*shape: int) -> Tensor:
    """A tensor of no consequence."""
    return torch.zeros(shape)
