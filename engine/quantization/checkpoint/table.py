"""Weights that are numbers of entries in a table."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from engine.quantization.matrix import IntegerFormat, Rows
from kernels.interface import Integers


class TableMatrix:
    """weight[r, k] = table[r, number[r, k]] * factor[r, k].

    Args:
        source: of which format it is, for the load report.
        shape: (N, K).
        numbers: of some rows, [n, K].
        tables: of some rows, [n or 1, entries].
        factors: of some rows, [n, K]; None: 1.
    """

    quantized = False
    stored_bits = 4
    integers: IntegerFormat | None = None

    def __init__(
        self,
        source: str,
        shape: tuple[int, int],
        numbers: Callable[[Rows], Tensor],
        tables: Callable[[Rows], Tensor],
        factors: Callable[[Rows], Tensor] | None = None,
    ) -> None:
        self.source, self.shape, self.row_bytes = source, shape, shape[1] * 20
        self._numbers, self._tables, self._factors = numbers, tables, factors

    def floats(self, rows: Rows) -> Tensor:
        """See `Matrix`: float32, not rounded."""
        numbers, tables = self._numbers(rows).long(), self._tables(rows).float()
        if len(tables) == 1:
            found = tables[0][numbers]
        else:
            found = tables.gather(1, numbers)
        return found if self._factors is None else found.mul_(self._factors(rows))

    def as_integers(self, rows: Rows) -> Integers:
        """See `Matrix`."""
        raise ValueError("entries of a table are no integers of the kernels")
