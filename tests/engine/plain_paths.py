"""Engines that run without one of the compiled CPU paths, to compare them with those that have it.

Each is for the time in which an engine is made; what it runs later stays as it was made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from engine.models.decoder import NativeDecoder
from engine.sampling.sampler import Sampler
from kernels.cpu import CpuKernels
from kernels.interface import KernelSet


def layer_by_layer() -> AbstractContextManager[Any]:
    """No call for all layers, and so none for whole steps."""
    return patch("engine.models.decoder.compile_decoder", return_value=None)


def without_compiled_steps() -> AbstractContextManager[Any]:
    """Decode steps run as others do: layers, head and sampling one after the other."""
    return patch.object(NativeDecoder, "compile_step", return_value=None)


def expert_by_expert() -> AbstractContextManager[Any]:
    """No call for all experts of a layer, and so none for all layers."""
    return patch.object(CpuKernels, "compile_experts", KernelSet.compile_experts)


@contextmanager
def sampling_by_torch() -> Iterator[None]:
    """Torch chooses tokens."""

    def make_sampler(eos_token_ids: Any, ops: Any, *options: Any) -> Sampler:
        return Sampler(eos_token_ids, None, *options)

    with patch("engine.devices.cpu.Sampler", make_sampler):
        yield
