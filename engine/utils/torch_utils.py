"""Names of `vllm.utils.torch_utils`."""

import random

import numpy
import torch


def set_random_seed(seed: int | None) -> None:
    """Seed Python's, NumPy's and torch's global generators; None leaves them alone.

    The engine uses none of these: a request's random numbers follow from its own seed.
    """
    if seed is not None:
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
