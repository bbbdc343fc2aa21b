"""A CPU's process keeps the memory of freed tensors for the next ones."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable
from pathlib import Path

import torch

from engine import LLM
from engine.devices.cpu import _M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD

MIB = 1 << 20


def count_page_faults(run: Callable[[], object]) -> int:
    """Pages that the system maps meanwhile."""
    previous = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - previous


def allocate_layers() -> None:
    """What ten layers take and free again: four tensors of 4 MiB each."""
    for _ in range(10):
        tensors = [torch.empty(MIB).fill_(1.0) for _ in range(4)]
        del tensors


def test_layers_reuse_the_pages_of_those_before(model_folder: Callable[[str], Path]) -> None:
    mallopt = ctypes.CDLL(None).mallopt
    for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
        assert mallopt(parameter, 128 << 10)  # as in a new process
    pages = 10 * 4 * 4 * MIB // resource.getpagesize()
    assert count_page_faults(allocate_layers) > pages / 2
    LLM(str(model_folder("llama")), num_gpu_blocks_override=8, max_model_len=64)
    allocate_layers()
    assert count_page_faults(allocate_layers) < pages / 10
