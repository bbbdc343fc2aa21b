"""Adapters in PEFT's layout, as bytes and as folders, for tests that run no model."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from engine.contract.lora import CONFIG_FILE, WEIGHTS_FILE

CHECK = ["tests.fakes.adapter_check"]


def adapter_bytes(seed: int = 0, **config: Any) -> dict[str, bytes]:
    """File name -> content; another `seed` is other weights."""
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    header = {name: {"dtype": "F32", "shape": [1, 4], "data_offsets": [0, 16]}}
    encoded = json.dumps(header).encode()
    weights = struct.pack("<Q", len(encoded)) + encoded + struct.pack("<4f", seed, 1, 2, 3)
    settings = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"], **config}
    return {CONFIG_FILE: json.dumps(settings).encode(), WEIGHTS_FILE: weights}


def adapter_folder(folder: Path, seed: int = 0, **config: Any) -> Path:
    """The same as a folder, made new."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in adapter_bytes(seed, **config).items():
        (folder / name).write_bytes(content)
    return folder
