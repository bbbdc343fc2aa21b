"""Products that checkpoints keep as one tensor, and GGUF as two: which, and where each row is."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.gguf.metadata import Metadata

_SHARED = re.compile(r"model\.layers\.(\d+)\.shared_mlp\.input_linear\.weight")
_DELTA = re.compile(r"model\.layers\.(\d+)\.linear_attn\.in_proj_qkvz\.weight")


@dataclass(frozen=True, slots=True)
class Fused:
    """How a checkpoint's tensor lies in a file.

    Attributes:
        stored: names of the file's tensors.
        sizes: how many rows of each it takes, which are all that they may have.
        places: gives of each row whose it is, and which there; int64 [rows].
    """

    stored: tuple[str, str]
    sizes: tuple[int, int]
    places: Callable[[], tuple[Tensor, Tensor]]


def fused_of(name: str, values: Metadata) -> Fused | None:
    """How a checkpoint's tensor lies in a file; None: as one tensor."""
    if match := _SHARED.fullmatch(name):
        return _gate_and_up(f"blk.{match.group(1)}.", values)
    match = _DELTA.fullmatch(name)
    if match is None or values.has(f"blk.{match.group(1)}.ssm_in.weight"):
        return None
    return _by_key_head(f"blk.{match.group(1)}.", values)


def _gate_and_up(at: str, values: Metadata) -> Fused:
    """Granite's MLP; beside experts it's the one that every token goes through."""
    kind = "" if values.has(f"{at}ffn_gate.weight") else "_shexp"
    gate, up = (f"{at}ffn_{part}{kind}.weight" for part in ("gate", "up"))
    info = values.header.tensors.get(gate)
    size = 0 if info is None else info.shape[0]

    def places() -> tuple[Tensor, Tensor]:
        rows = torch.arange(2 * size)
        return rows // size, rows % size

    return Fused((gate, up), (size, size), places)


def _by_key_head(at: str, values: Metadata) -> Fused:
    """Qwen3-Next: of each key head its query, key, values and gates; a file has all queries, all
    keys and all values, and the gates by themselves.
    """
    heads, key = values.count("ssm.group_count"), values.count("ssm.state_size")
    wide, keys = values.count("ssm.inner_size") // heads, heads * key

    def places() -> tuple[Tensor, Tensor]:
        by_key = torch.arange(keys).view(heads, key)
        by_value = torch.arange(heads * wide).view(heads, wide)
        row_of = torch.cat((by_key, keys + by_key, 2 * keys + by_value, by_value), dim=1)
        gates = torch.arange(row_of.shape[1]) >= 2 * key + wide
        return gates.long().repeat(heads), row_of.flatten()

    stored = f"{at}attn_qkv.weight", f"{at}attn_gate.weight"
    return Fused(stored, (2 * keys + heads * wide, heads * wide), places)
