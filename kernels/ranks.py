"""The contract of ranks: processes that share a model's layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kernels.layers import LinearLayer


class Exchange(Protocol):
    """Brings the slots of ranks that share no memory to all of them."""

    def exchange(self, slots: Sequence[Tensor]) -> None:
        """Send this rank's slot to all others, and receive theirs; float32 [n] of each rank.

        Raises `RankError`, and `RankTimeout` for a rank that doesn't come in time.
        """

    def reset(self) -> None:
        """Drop what was sent until now."""


class RankGroup(ABC):
    """One rank's side of a group. All ranks gather the same things in the same order.

    Attributes:
        rank, size: 0 <= rank < size.
    """

    rank: int
    size: int

    @abstractmethod
    def shard_linear(
        self, layer: LinearLayer, outputs: Sequence[int], inputs: Sequence[int] | None = None
    ) -> None:
        """Make a layer of this rank's rows one that gives all ranks' outputs.

        Args:
            outputs: [size + 1], rank r has the rows from outputs[r] to outputs[r + 1].
            inputs: likewise, the columns of x that each rank has: they are gathered before the
                product. None: each has all of x.

        A row's sum is computed by one rank, as it is without ranks: the bits are the same. Calls
        raise `RankError` where another rank has failed or doesn't come in time.
        """

    @abstractmethod
    def gather(self, local: Tensor, starts: Sequence[int]) -> Tensor:
        """float32 [T, starts[-1]] of each rank's [T, starts[rank + 1] - starts[rank]].

        Raises `RankError` where another rank has failed or doesn't come in time.
        """

    @property
    @abstractmethod
    def num_gathers(self) -> int:
        """Number of gathers since the start or the latest `reset`."""

    @property
    @abstractmethod
    def missing_rank(self) -> int | None:
        """The rank that the latest gather waited for in vain."""

    @property
    @abstractmethod
    def waited_s(self) -> float:
        """Seconds that this rank has waited in gathers for others."""

    @abstractmethod
    def fail(self) -> None:
        """Have this and all later gathers of all ranks fail. Any thread may call it."""

    @abstractmethod
    def reset(self) -> None:
        """Reset after a failure: every rank does, while none is in a gather."""

    @abstractmethod
    def forget_failure(self) -> None:
        """Let gathers succeed again, once all ranks have been reset."""
