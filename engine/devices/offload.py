"""Finds all tensors of a model, and moves them to host memory and back."""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kernels import KernelSet

log = logging.getLogger(__name__)

_OURS = ("engine", "kernels")
Pin = Callable[[Tensor], Callable[[], None]]


def iter_tensors(root: object) -> Iterator[Tensor]:
    """Every tensor that is reached from an object, each once.

    The way leads through containers, modules of torch, methods and partials, and the fields of our
    own objects; not through sets of kernels, which models share. No closure of ours holds a tensor.
    """
    seen: set[int] = set()
    pending = [root]
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield item
            continue
        pending += _reachable(item)


def _reachable(item: Any) -> list[Any]:
    """Attributes and items of an object that may lead to tensors."""
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, list | tuple | set | frozenset):
        return list(item)
    if isinstance(item, types.MethodType):
        return [item.__self__]
    if isinstance(item, functools.partial):
        return [item.func, *item.args, *item.keywords.values()]
    if isinstance(item, KernelSet | type | types.FunctionType | types.ModuleType):
        return []
    ours = type(item).__module__.partition(".")[0] in _OURS
    return _fields(item) if ours or isinstance(item, nn.Module) else []


def _fields(item: Any) -> list[Any]:
    values = list(getattr(item, "__dict__", {}).values())
    for kind in type(item).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            values.append(getattr(item, name, None))
    return values


class HostCopy:
    """The tensors of a device in host memory, while the device's memory is others' to use.

    Tensors stay the objects that they are and have no memory meanwhile; `restore` gives them new
    memory, at other addresses. Views of one storage stay views of it.

    Args:
        tensors: what is to be put away; those on other devices, or whose memory isn't torch's own,
            are left alone.
        device: whose memory is given back.
        pin: locks a host tensor's pages, which a GPU then copies from at full speed, and returns
            what lets go of them; None: they stay as they are. (torch's own pinned memory would be
            kept for later, up to twice as much as was asked for.) Where it raises RuntimeError, as
            with a limit on locked memory, pages stay as they are too.

    Where host memory is short, everything is on the device again before the error is raised.
    """

    def __init__(
        self, tensors: Iterator[Tensor], device: torch.device, pin: Pin | None = None
    ) -> None:
        self._copies: list[tuple[torch.UntypedStorage, Tensor, Callable[[], None]]] = []
        self._pin = pin
        try:
            self._copy_out(tensors, device)
        except BaseException:
            self.restore()
            raise

    def _copy_out(self, tensors: Iterator[Tensor], device: torch.device) -> None:
        seen: set[int] = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            ours = tensor.device.type == device.type and storage.resizable()
            if not ours or not storage.nbytes() or storage._cdata in seen:
                continue
            seen.add(storage._cdata)
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8)
            unpin = self._locked(copy)
            try:
                copy.untyped_storage().copy_(storage, non_blocking=False)
            except BaseException:
                unpin()
                raise
            storage.resize_(0)
            self._copies.append((storage, copy, unpin))

    def _locked(self, copy: Tensor) -> Callable[[], None]:
        """Lock a copy's pages if possible; returns what unlocks them."""
        if self._pin is None:
            return _nothing
        try:
            return self._pin(copy)
        except RuntimeError as error:
            log.warning("Weights sleep in pages that aren't locked, and wake slowly: %s", error)
            self._pin = None
            return _nothing

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(copy.nbytes for _, copy, _ in self._copies)

    def restore(self) -> None:
        """Bring everything back. Where memory is short (torch.OutOfMemoryError) it can be called
        again once there is more.
        """
        while self._copies:
            storage, copy, unpin = self._copies[-1]
            storage.resize_(copy.nbytes)
            storage.copy_(copy.untyped_storage(), non_blocking=False)
            self._copies.pop()
            unpin()

    def discard(self) -> None:
        """Give the host memory back, and never the device's: the tensors aren't used any more."""
        while self._copies:
            self._copies.pop()[2]()


def _nothing() -> None:
    pass
