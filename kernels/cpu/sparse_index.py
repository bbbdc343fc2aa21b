"""Selection of the tokens that a query attends to, computed by the library."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.cpu import abi as c
from kernels.cpu.library import Library, check
from kernels.cpu.memory import num_threads
from kernels.sparse_index import check_selection


def select_tokens(
    library: Library, queries: Tensor, factors: Tensor, keys: Tensor, visible: Tensor, top_k: int
) -> Tensor:
    """See `KernelSet.select_tokens`."""
    check_selection(queries, factors, keys, visible, top_k)
    count, heads, size = queries.shape
    queries, factors = queries.float().contiguous(), factors.float().contiguous()
    by_column, visible = keys.float().T.contiguous(), visible.long().contiguous()
    out = torch.empty((count, top_k), dtype=torch.int64)
    args = c.SelectTokens(
        out=out.data_ptr(),
        queries=queries.data_ptr(),
        factors=factors.data_ptr(),
        keys=by_column.data_ptr(),
        visible=visible.data_ptr(),
        rows=count,
        heads=heads,
        size=size,
        num_keys=len(keys),
        top_k=top_k,
        scale=size**-0.5,
    )
    if status := library.select_tokens(ctypes.byref(args), num_threads()):
        check(status)
    return out
