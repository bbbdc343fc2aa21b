"""Small things of vLLM's that its programs import and that need torch."""

import random
from enum import StrEnum

import numpy
import torch

from kernels.attention.registry import BACKENDS

#: The registered backends; a member may stand wherever a backend's name may.
AttentionBackendEnum = StrEnum("AttentionBackendEnum", {name: name for name in BACKENDS})  # type: ignore[misc]


def set_random_seed(seed: int | None) -> None:
    """Seed Python's, NumPy's and torch's global generators; None leaves them alone.

    The engine uses none of these: a request's random numbers follow from its own seed.
    """
    if seed is not None:
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
