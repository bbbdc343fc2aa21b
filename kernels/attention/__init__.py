"""Which implementation of attention runs: a registry of backends that say what they can do."""

from kernels.attention.args import AttentionArgs, BlockSparse
from kernels.attention.backend import AttentionBackend, AttentionNeed, GraphSupport
from kernels.attention.registry import (
    BACKENDS,
    NoAttentionBackend,
    get_backend,
    register_backend,
    select_backend,
)

__all__ = [
    "BACKENDS",
    "AttentionArgs",
    "AttentionBackend",
    "AttentionNeed",
    "BlockSparse",
    "GraphSupport",
    "NoAttentionBackend",
    "get_backend",
    "register_backend",
    "select_backend",
]
