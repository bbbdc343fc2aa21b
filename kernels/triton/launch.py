"""`launch` runs every Triton kernel, so that launches can be observed in one place.

`watch` passes launches to a callback instead of a device. The ahead-of-time compiler learns from it
which kernels an operation needs, with which types and constants.
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
ON_AMD: bool = torch.version.hip is not None
"""Whether torch's "cuda" devices are AMD GPUs."""


def check_interpreter(triton_version: str, numpy_version: str) -> None:
    """Raise `KernelsUnavailable` if this Triton's interpreter doesn't work with this numpy."""

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
    """The device for which kernels are chosen.

    Attributes:
        capability: compute capability times ten: 80, 90, 100; 0 for the interpreter and AMD GPUs.
        processors: number of streaming multiprocessors, or of AMD's compute units.
        shared: bytes of shared memory available to a program.
        gfx: AMD's name of the architecture, such as "gfx942"; "" for others.
    """

    capability: int
    processors: int
    shared: int = 232_448
    gfx: str = ""

    @property
    def native_fp8(self) -> bool:
        """Whether the device converts OCP's fp8 in hardware, as NVIDIA's do from 8.9 on.

        gfx942 has different 8-bit floats (without negative zero), gfx90a and gfx1100 have none.
        """
        return self.capability >= 89

    @property
    def interpreted(self) -> bool:
        """Whether this is Triton's interpreter."""
        return self.capability == 0 and not self.gfx

    @property
    def runs_ptx(self) -> bool:
        """Whether kernels may contain NVIDIA's assembly."""
        return self.capability > 0


INTERPRETER = Target(0, 2)
Watcher = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]
_watcher: contextvars.ContextVar[tuple[Watcher, Target] | None] = contextvars.ContextVar(
    "watcher", default=None
)


@functools.cache
def _device_target(index: int) -> Target:
    properties: Any = torch.cuda.get_device_properties(index)
    if ON_AMD:
        return Target(
            0,
            properties.multi_processor_count,
            properties.shared_memory_per_block,
            properties.gcnArchName.partition(":")[0],
        )
    return Target(
        properties.major * 10 + properties.minor,
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,
    )


def target_of(device: torch.device) -> Target:
    """Return the target for tensors on `device`. Raises ValueError if Triton kernels can't run
    there.
    """
    watched = _watcher.get()
    if watched is not None:
        return watched[1]
    if device.type == "cuda":
        return _device_target(torch.cuda.current_device() if device.index is None else device.index)
    if INTERPRETED:
        return INTERPRETER
    raise ValueError(f"Triton kernels need a GPU, not tensors on {device}")


def no_device(*, interpreted: bool) -> str:
    """Return why these kernels can't run here, as a sentence; "" if they can.

    `interpreted`: the interpreter suffices.
    """
    if torch.cuda.is_available() or (interpreted and INTERPRETED):
        return ""
    way = " Set TRITON_INTERPRET=1 to run it on this CPU." if interpreted else ""
    return f"torch sees no CUDA device.{way}"


@contextlib.contextmanager
def watch(watcher: Watcher, target: Target) -> Iterator[None]:
    """Pass launches to `watcher(kernel, grid, arguments, options)` instead of running them."""
    token = _watcher.set((watcher, target))
    try:
        yield
    finally:
        _watcher.reset(token)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run `kernel` on `grid`; an empty grid runs nothing.

    `options` are the kernel's constants, `num_warps` and `num_stages`.
    """
    if 0 in grid:
        return
    watched = _watcher.get()
    if watched is not None and watched[1].gfx:
        options = _amd_options(options, watched[1].gfx)
    elif ON_AMD:
        options = _amd_options(options, _device_target(torch.cuda.current_device()).gfx)
    if watched is not None:
        watched[0](kernel, grid, args, options)
        return
    kernel[grid](*args, **options)


def _amd_options(options: dict[str, Any], gfx: str) -> dict[str, Any]:
    """Adapt options to AMD's compiler. It has no register limit, and tf32 products only on gfx942,
    so float32 is multiplied exactly. Waves have 64 threads on CDNA (gfx9) but 32 on RDNA, where a
    program gets twice as many waves.
    """
    options = {name: value for name, value in options.items() if name != "maxnreg"}
    if "PRECISION" in options:
        options["PRECISION"] = "ieee"
    if not gfx.startswith("gfx9") and "num_warps" in options:
        options["num_warps"] *= 2
    return options
