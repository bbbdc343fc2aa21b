"""Which implementation of attention runs: a registry of backends that say what they can do."""

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
