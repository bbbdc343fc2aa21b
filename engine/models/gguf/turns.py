"""Experts of gpt-oss: checkpoints have rows of gate and up in turns, GGUF keeps them apart."""

from __future__ import annotations

import re

import torch

from engine.models.gguf.gathered import Gathered
from engine.models.gguf.matrix import GGUFMatrix

_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)#(\d+)\.weight")
_BIAS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)_bias")
_PARTS = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}


def expert_tensors(name: str) -> tuple[list[str], int] | None:
    """The file's tensors that a checkpoint's tensor of one expert is made of, and its number."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    layer, kind, expert = match.groups()
    return [f"blk.{layer}.{part}.weight" for part in _PARTS[kind]], int(expert)


def bias_tensors(name: str) -> list[str]:
    """The same of the biases of all experts; none for another name."""
    match = _BIAS.fullmatch(name)
    if match is None:
        return []
    layer, kind = match.groups()
    return [f"blk.{layer}.{part}.bias" for part in _PARTS[kind]]


def in_turns(first: GGUFMatrix, second: GGUFMatrix) -> Gathered:
    """Rows of two in turns."""
    rows = torch.arange(first.shape[0] * 2)
    return Gathered((first, second), rows % 2, rows // 2)
