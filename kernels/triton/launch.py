"""Every launch of a Triton kernel goes through `launch`, so that one place can watch them.

`watch` hands launches to somebody else instead of a device: the ahead-of-time compiler learns from
it which kernels an operation needs, with which types and constants.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton

from kernels.errors import KernelsUnavailable

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1), on CPU tensors."""


def check_interpreter(triton_version: str, numpy_version: str) -> None:
    """Raise `KernelsUnavailable` for a pair of versions whose interpreter fails."""

    def parts(version: str) -> tuple[int, ...]:
        return tuple(int(part) for part in version.split(".")[:2])

    if parts(triton_version) < (3, 7) and parts(numpy_version) >= (2, 4):
        raise KernelsUnavailable(
            f"Triton {triton_version}'s interpreter (TRITON_INTERPRET=1) doesn't work with numpy "
            f"{numpy_version}: install Triton 3.7 or later, or a numpy before 2.4. On a GPU either "
            "will do."
        )


if INTERPRETED:
    check_interpreter(triton.__version__, np.__version__)


@dataclass(frozen=True, slots=True)
class Target:
    """The device that kernels are chosen for.

    Attributes:
        capability: compute capability times ten: 80, 90, 100; 0 in the interpreter.
        processors: streaming multiprocessors.
        shared: bytes of shared memory that one program can have.
    """

    capability: int
    processors: int
    shared: int = 232_448

    @property
    def native_fp8(self) -> bool:
        """Whether the device converts fp8 by itself (from 8.9 on)."""
        return self.capability >= 89


INTERPRETER = Target(0, 2)
Watcher = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]
_watcher: contextvars.ContextVar[tuple[Watcher, Target] | None] = contextvars.ContextVar(
    "watcher", default=None
)


@functools.cache
def _device_target(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    return Target(
        properties.major * 10 + properties.minor,
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]  # not in stubs
    )


def target_of(device: torch.device) -> Target:
    """What runs kernels on tensors of `device`. Raises ValueError where nothing does."""
    watched = _watcher.get()
    if watched is not None:
        return watched[1]
    if device.type == "cuda":
        return _device_target(torch.cuda.current_device() if device.index is None else device.index)
    if INTERPRETED:
        return INTERPRETER
    raise ValueError(f"Triton kernels need a GPU, not tensors on {device}")


def no_device(*, interpreted: bool) -> str:
    """Why nothing here runs these kernels, as a sentence; "" where something does.

    `interpreted`: the interpreter will do.
    """
    if torch.cuda.is_available() or (interpreted and INTERPRETED):
        return ""
    way = " Set TRITON_INTERPRET=1 to run it on this CPU." if interpreted else ""
    return f"torch sees no CUDA device.{way}"


@contextlib.contextmanager
def watch(watcher: Watcher, target: Target) -> Iterator[None]:
    """Within it, launches go to `watcher(kernel, grid, arguments, options)` and run nowhere."""
    token = _watcher.set((watcher, target))
    try:
        yield
    finally:
        _watcher.reset(token)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run `kernel` on `grid`; an empty grid runs nothing.

    `options` are its constants, and `num_warps` and `num_stages`.
    """
    if 0 in grid:
        return
    watched = _watcher.get()
    if watched is not None:
        watched[0](kernel, grid, args, options)
        return
    kernel[grid](*args, **options)
