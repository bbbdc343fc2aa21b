"""One function an operation, in several implementations; `get` picks one and says why.

`kernels.interface` states the contract of each function. `kernels.reference` holds plain torch
versions: the oracle of the tests, and what runs where nothing faster can. `kernels.cpu` holds the
compiled CPU kernels, `kernels.triton` those for GPUs.
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
    """The fastest kernels that work on `device`, the same object each time.

    `use_compiled=False` gives the plain torch reference. Never raises for want of a compiler or of
    Triton: the set's `.why` and one log line say what was chosen and why. The environment variable
    QUIRE_KERNELS ("reference", "cpu" or "triton") chooses instead, and raises `KernelsUnavailable`
    for any other value and where that set can't run. `batch_invariant` asks for a set that is, and
    raises `KernelsUnavailable` where there is none.
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
    """The batch-invariant form of a set. Raises `KernelsUnavailable` if it has none."""
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
