"""A CPU's process keeps the memory of freed tensors for the next ones."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

#: Prints how many pages the system maps while ten layers take and free four tensors of 24 MiB each.
PROGRAM = """
import resource, sys
import torch
from engine import LLM

def allocate_layers():
    for _ in range(10):
        tensors = [torch.empty(6 << 20).fill_(1.0) for _ in range(4)]
        del tensors

if sys.argv[1:]:
    llm = LLM(sys.argv[1], num_gpu_blocks_override=8, max_model_len=64)
allocate_layers()
previous = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
allocate_layers()
print("mapped", resource.getrusage(resource.RUSAGE_SELF).ru_minflt - previous)
"""


def count_mapped_pages(*arguments: str) -> int:
    """In a process of its own: what other tests have freed could be used again."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(output.rsplit("mapped", 1)[1])


def test_layers_reuse_the_pages_of_those_before(model_folder: Callable[[str], Path]) -> None:
    pages = 10 * 4 * (24 << 20) // resource.getpagesize()
    assert count_mapped_pages(str(model_folder("llama"))) < pages / 10
