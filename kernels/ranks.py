"""The interface of ranks: processes that share a model's layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kernels.layers import LinearLayer


class Exchange(Protocol):
    """Distributes the slots of ranks that don't share memory to all of them."""

    def exchange(self, slots: Sequence[Tensor]) -> None:
        """Send this rank's slot to all others and receive theirs, float32 [n] per rank.

        Raises `RankError`, or `RankTimeout` if a rank is too late.
        """

    def reset(self) -> None:
        """Drop everything that has been sent."""


class RankGroup(ABC):
    """A rank's handle of its group. All ranks must gather the same tensors in the same order.

    Attributes:
        rank, size: 0 <= rank < size.
    """

    rank: int
    size: int

    @abstractmethod
    def shard_linear(
        self, layer: LinearLayer, outputs: Sequence[int], inputs: Sequence[int] | None = None
    ) -> None:
        """Wrap a layer with this rank's rows as one that returns all ranks' outputs.

        Args:
            outputs: [size + 1]; rank r has the rows from outputs[r] to outputs[r + 1].
            inputs: likewise for each rank's columns of x, which are gathered before the product.
            None if every rank has the whole x.

        Each sum is computed by a single rank, so the results equal those without ranks bitwise.
        Calls raise `RankError` if another rank has failed or is too late.
        """

    @abstractmethod
    def gather(self, local: Tensor, starts: Sequence[int]) -> Tensor:
        """Gather each rank's [T, starts[rank + 1] - starts[rank]] to float32 [T, starts[-1]].

        Raises `RankError` if another rank has failed or is too late.
        """

    @property
    @abstractmethod
    def num_gathers(self) -> int:
        """Number of gathers since the start or the latest `reset`."""

    @property
    @abstractmethod
    def missing_rank(self) -> int | None:
        """Return the rank for which the latest gather timed out."""

    @property
    @abstractmethod
    def waited_s(self) -> float:
        """Return the seconds that this rank has waited for others in gathers."""

    @abstractmethod
    def listen(self) -> bool:
        """Sleep until another rank waits in a gather that this one isn't in. False: interrupted.

        No gather may run here meanwhile. Raises `RankError` if a rank has failed.
        """

    @abstractmethod
    def interrupt(self) -> None:
        """End this rank's `listen`, or the next one. May be called from any thread."""

    @abstractmethod
    def fail(self) -> None:
        """Make this and all later gathers of all ranks fail. May be called from any thread."""

    @abstractmethod
    def reset(self) -> None:
        """Reset after a failure. All ranks must do this while none is in a gather."""

    @abstractmethod
    def forget_failure(self) -> None:
        """Let gathers succeed again, once all ranks have been reset."""
