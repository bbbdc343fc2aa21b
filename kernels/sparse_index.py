"""Selection of the tokens that a query attends to (DeepSeek Sparse Attention, arXiv 2512.02556)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.tensors import describe


def select_tokens(
    queries: Tensor, factors: Tensor, keys: Tensor, visible: Tensor, top_k: int
) -> Tensor:
    """Return the tokens with the largest scores, int64 [n, top_k], ascending. A row's result
    doesn't depend on the other rows.

    The score of a token is the sum over heads of factor * relu(query . key / sqrt(head_dim)).

    Args:
        queries: [n, heads, head_dim]. factors: [n, heads].
        keys: [m, head_dim] of a sequence's tokens.
        visible: int64 [n], the number of tokens that a query chooses from, `top_k` to m.

    Raises ValueError for inconsistent shapes, and if a query sees too few tokens or too many.
    """
    check_selection(queries, factors, keys, visible, top_k)
    chosen = []
    for query, factor, count in zip(queries.float(), factors.float(), visible.tolist()):
        products = query @ keys[:count].float().T * keys.shape[1] ** -0.5
        chosen.append((factor @ products.relu_()).topk(top_k).indices.sort().values)
    return torch.stack(chosen) if chosen else visible.new_empty((0, top_k))


def check_selection(
    queries: Tensor, factors: Tensor, keys: Tensor, visible: Tensor, top_k: int
) -> None:
    """Raise ValueError for inconsistent arguments of `select_tokens`."""
    count = len(visible)
    fits = queries.shape[:1] == (count,) and queries.shape[2:] == keys.shape[1:]
    if not fits or factors.shape != queries.shape[:2]:
        raise ValueError(
            f"queries {describe(queries)}, factors {describe(factors)}, keys {describe(keys)} and "
            f"visible {describe(visible)} don't go together"
        )
    if count and not top_k <= int(visible.min()) <= int(visible.max()) <= len(keys):
        raise ValueError(f"a query must choose {top_k} from as many tokens up to {len(keys)}")
