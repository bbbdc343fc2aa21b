"""Kernel sets: several implementations of the same operations. `get` selects one and logs why.

`kernels.interface` defines each operation. `kernels.reference` has plain torch versions, which are
the tests' oracle and the fallback. `kernels.cpu` has the compiled CPU kernels, `kernels.triton`
those for GPUs.
"""

from __future__ import annotations

import importlib.util
import logging
import os

import torch

from kernels.errors import KernelsUnavailable
from kernels.interface import KernelSet, LinearLayer

__all__ = ["KernelSet", "KernelsUnavailable", "LinearLayer", "get"]

logger = logging.getLogger(__name__)
_chosen: dict[tuple[str, bool, str, bool], KernelSet] = {}


FORCED = "QUIRE_KERNELS"


def get(
    device: torch.device | str, *, use_compiled: bool = True, batch_invariant: bool = False
) -> KernelSet:
    """Return the fastest kernels for `device`; repeated calls return the same object.

    `use_compiled=False` returns the plain torch reference. A missing compiler or Triton is no
    error: the set's `.why` and a log line say what was chosen and why. The environment variable
    QUIRE_KERNELS ("reference", "cpu" or "triton") overrides the choice. With `batch_invariant` a
    row's results don't depend on the batch.

    Raises `KernelsUnavailable` for another value of QUIRE_KERNELS, if that set can't run, or if
    there is no batch-invariant set.
    """
    kind, forced = torch.device(device).type, os.environ.get(FORCED, "auto")
    key = (kind, use_compiled, forced, batch_invariant)
    if key not in _chosen:
        chosen = _choose(kind, use_compiled, forced)
        _chosen[key] = _invariant(chosen) if batch_invariant else chosen
        logger.info("%s kernels on %s: %s", _chosen[key].name, key[0], _chosen[key].why)
    return _chosen[key]


def _choose(kind: str, use_compiled: bool, forced: str) -> KernelSet:
    from kernels.reference import ReferenceKernels

    if not use_compiled:
        return ReferenceKernels("compiled kernels are switched off", kind)
    if forced != "auto":
        return _forced(forced, kind)
    if kind == "cpu":
        return _cpu()
    if kind == "cuda":
        if importlib.util.find_spec("triton"):
            return _triton(kind)
        return ReferenceKernels("Triton is not installed", kind)
    return ReferenceKernels(f"no kernels are written for {kind}", kind)


def _invariant(chosen: KernelSet) -> KernelSet:
    """Return a set's batch-invariant form. Raises `KernelsUnavailable` if it has none."""
    if chosen.name == "triton":
        from kernels.triton import load
        from kernels.triton.batch_invariant import InvariantTritonKernels

        return load(chosen.device, InvariantTritonKernels)
    if not chosen.batch_invariant:
        raise KernelsUnavailable(
            f"batch_invariant needs compiled kernels, and plain torch runs here: {chosen.why}",
            "batch_invariant",
        )
    return chosen


def _forced(name: str, kind: str) -> KernelSet:
    from kernels.reference import ReferenceKernels

    if name == "reference":
        return ReferenceKernels(f"{FORCED} asks for it", kind)
    if name == "triton":
        if not importlib.util.find_spec("triton"):
            raise KernelsUnavailable(f"{FORCED}=triton: Triton is not installed")
        return _triton(kind)
    if name == "cpu" and kind == "cpu":
        from kernels.cpu import CpuKernels

        return CpuKernels()
    raise KernelsUnavailable(
        f'{FORCED} must be "auto", "reference", "triton" or, on a CPU, "cpu"; '
        f"got {name!r} on {kind}"
    )


def _triton(kind: str) -> KernelSet:
    from kernels.triton import load

    return load(kind)


def _cpu() -> KernelSet:
    from kernels.reference import ReferenceKernels

    if not importlib.util.find_spec("kernels.cpu"):
        return ReferenceKernels("the compiled CPU kernels are not installed")
    from kernels.cpu import CpuKernels, CpuKernelsUnavailable

    try:
        return CpuKernels()
    except CpuKernelsUnavailable as error:
        logger.warning("The compiled CPU kernels can't be used, plain torch is: %s", error)
        return ReferenceKernels(str(error))
