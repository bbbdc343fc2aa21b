"""`RowAdapters`: which adapter each row of the running batch goes through."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from engine.models.adapters import NO_ADAPTERS, AdapterWeights, StepAdapters
from kernels.lora import TableUse


class RowAdapters:
    """Most rows go through none."""

    def __init__(self, loaded: Mapping[str, AdapterWeights] | None = None) -> None:
        """`loaded`: those that plans name by digest; None: they name none."""
        self._loaded = {} if loaded is None else loaded
        self._by_row: dict[int, AdapterWeights] = {}

    def put(self, row: int, digest: str) -> None:
        """A sequence came; "": it goes through none."""
        if digest:
            self._by_row[row] = self._loaded[digest]

    def drop(self, row: int) -> None:
        """The row's sequence has left."""
        self._by_row.pop(row, None)

    def vocab_size(self, row: int) -> int:
        """Tokens that a row may hold, where its adapter brings some; 0: the model's."""
        adapter = self._by_row.get(row)
        return 0 if adapter is None else adapter.vocab_size

    def classifier(self, row: int) -> Callable[[Tensor], Tensor] | None:
        """A pooling model's head of a row in the place of the model's own; None: that one."""
        adapter = self._by_row.get(row)
        return None if adapter is None else adapter.classifier

    def of_tokens(self, owner: np.ndarray) -> StepAdapters:
        """The adapters of tokens that belong to the rows `owner`."""
        if not self._by_row:
            return NO_ADAPTERS
        places: dict[str, int] = {}
        adapters: list[AdapterWeights] = []
        rows, of_token = np.unique(owner, return_inverse=True)
        group = np.full(len(rows), -1)
        for at, row in enumerate(rows.tolist()):
            if (adapter := self._by_row.get(row)) is not None:
                if adapter.digest not in places:
                    places[adapter.digest] = len(adapters)
                    adapters.append(adapter)
                group[at] = places[adapter.digest]
        of_token = group[of_token]
        found = [
            (adapter, torch.from_numpy(np.flatnonzero(of_token == at)))
            for at, adapter in enumerate(adapters)
        ]
        return StepAdapters(found)

    def compiled(self, rows: np.ndarray) -> list[TableUse] | None:
        """What takes the rows' tokens, one each, through whole steps in one call, by their places;
        None: one of their adapters can't be run so.
        """
        adapters = self.of_tokens(rows)
        if not all(adapter.is_compiled for adapter, _ in adapters.groups):
            return None
        return adapters.tables()
