"""One lab for all pairs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.cpu import CpuKernels, CpuKernelsUnavailable
from tests.features.guesses import guessing
from tests.features.lab import Lab


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Engines over tiny checkpoints."""
    try:
        CpuKernels()
    except CpuKernelsUnavailable as error:  # bits depend on how a step was cut without them
        pytest.skip(str(error))
    torch.set_num_threads(1)
    with guessing() as guesses:
        yield Lab(tmp_path_factory.mktemp("features"), guesses)
