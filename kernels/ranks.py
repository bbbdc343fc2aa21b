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
        """Send this rank's slot to all others, and receive theirs; float32 [n] of each rank.

        Raises `RankError`, and `RankTimeout` for a rank that is too late.
        """

    def reset(self) -> None:
        """Drop everything that was sent so far."""


class RankGroup(ABC):
    """One rank's member of a group. All ranks gather the same things in the same order.

    Attributes:
        rank, size: 0 <= rank < size.
    """

    rank: int
    size: int

    @abstractmethod
    def shard_linear(
        self, layer: LinearLayer, outputs: Sequence[int], inputs: Sequence[int] | None = None
    ) -> None:
        """Combine a layer of this rank's rows into one that returns all ranks' outputs.

        Args:
            outputs: [size + 1], rank r has the rows from outputs[r] to outputs[r + 1].
            inputs: likewise for the columns of x of each rank, which are gathered before the
            product.
                None: each has all of x.

        A row's sum is computed by one rank, as without ranks: the bits are the same. Calls raise
        `RankError` if another rank has failed or is too late.
        """

    @abstractmethod
    def gather(self, local: Tensor, starts: Sequence[int]) -> Tensor:
        """float32 [T, starts[-1]] of each rank's [T, starts[rank + 1] - starts[rank]].

        Raises `RankError` if another rank has failed or is too late.
        """

    @property
    @abstractmethod
    def num_gathers(self) -> int:
        """Number of gathers since the start or the latest `reset`."""

    @property
    @abstractmethod
    def missing_rank(self) -> int | None:
        """The rank for which the latest gather waited in vain."""

    @property
    @abstractmethod
    def waited_s(self) -> float:
        """Seconds that this rank has waited in gathers for others."""

    @abstractmethod
    def fail(self) -> None:
        """Make this and all later gathers of all ranks fail. May be called from any thread."""

    @abstractmethod
    def reset(self) -> None:
        """Reset after a failure: every rank does, while none is in a gather."""

    @abstractmethod
    def forget_failure(self) -> None:
        """Let gathers succeed again, once all ranks have been reset."""
