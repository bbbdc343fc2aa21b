"""Weights that are numbers of entries in a table."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.quantization.matrix import Plain, Rows
from kernels.codes import Codes, Coding


class TableMatrix(Plain):
    """weight[r, k] = table[r, number[r, k]] * factor[r, k].

    Args:
        source: of which format it is, for the load report.
        shape: (N, K).
        numbers: of some rows, [n, K].
        tables: of some rows, [n or 1, entries].
        factors: of some rows, [n, K]; None: 1.
        group: so many neighbours of a row have the same factor, where kernels have such groups.
            Then there's one table for all rows.
    """

    quantized = False
    stored_bits = 4

    def __init__(
        self,
        source: str,
        shape: tuple[int, int],
        numbers: Callable[[Rows], Tensor],
        tables: Callable[[Rows], Tensor],
        factors: Callable[[Rows], Tensor] | None = None,
        group: int | None = None,
    ) -> None:
        self.source, self.shape, self.row_bytes = source, shape, shape[1] * 20
        self._numbers, self._tables, self._factors = numbers, tables, factors
        if group is not None:
            table = tuple(tables(slice(0, 1))[0].float().tolist())
            self.own = Coding("table", group, table)

    def floats(self, rows: Rows) -> Tensor:
        """See `Matrix`: float32, not rounded."""
        numbers, tables = self._numbers(rows).long(), self._tables(rows).float()
        if len(tables) == 1:
            found = tables[0][numbers]
        else:
            found = tables.gather(1, numbers)
        return found if self._factors is None else found.mul_(self._factors(rows))

    def as_own(self, rows: Rows) -> Codes:
        """See `Matrix`."""
        if not isinstance(self.own, Coding) or self._factors is None:
            raise ValueError(f"{self.source} has no form of the kernels")
        factors = self._factors(rows)[:, :: self.own.group_size]
        return Codes(self._numbers(rows).to(torch.uint8), factors)
