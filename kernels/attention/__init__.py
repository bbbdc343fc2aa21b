"""Chooses the implementation of attention: a registry of backends with their capabilities."""

from kernels.attention.registry import (
    BACKENDS,
    AttentionBackend,
    AttentionRequirements,
    GraphSupport,
    NoAttentionBackend,
    get_backend,
    register_backend,
    select_backend,
)
from kernels.attention_args import AttentionArgs, BlockSparse

__all__ = [
    "BACKENDS",
    "AttentionArgs",
    "AttentionBackend",
    "AttentionRequirements",
    "BlockSparse",
    "GraphSupport",
    "NoAttentionBackend",
    "get_backend",
    "register_backend",
    "select_backend",
]
