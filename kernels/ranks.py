"""The contract of ranks: processes that share a model's layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from kernels.layers import LinearLayer


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

    @abstractmethod
    def fail(self) -> None:
        """Have this and all later gathers of all ranks fail. Any thread may call it."""

    @abstractmethod
    def reset(self, *, is_last: bool) -> None:
        """Begin anew after a failure: each rank does, while none is in a gather.

        `is_last`: this rank is the last of them, and forgets the failure.
        """
