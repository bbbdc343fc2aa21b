"""One lab for all pairs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.cpu import CpuKernels, CpuKernelsUnavailable
from tests.features.guesses import guessing
from tests.features.lab import Lab


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Engines over tiny checkpoints. What it changes of the process ends with the module."""
    try:
        CpuKernels()
    except CpuKernelsUnavailable as error:  # bits depend on how a step was cut without them
        pytest.skip(str(error))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with guessing() as guesses:
            yield Lab(tmp_path_factory.mktemp("features"), guesses)
    finally:
        torch.set_num_threads(threads)
