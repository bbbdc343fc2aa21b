"""`assign_experts`: which ranks have which experts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def assign_experts(
    loads: Sequence[int],
    num_ranks: int,
    num_redundant: int = 0,
    current: Sequence[Sequence[int]] = (),
) -> list[tuple[int, ...]]:
    """The ranks that have each expert, ascending.

    As vLLM's balancer does: the `num_redundant` copies go one after the other to the expert with
    the largest load of a copy; then the largest copies are placed first, each on the rank with the
    smallest load that has a free place and no copy of it. All ranks have as many experts, to one.

    Args:
        loads: tokens that went to each expert.
        current: as they are now; equal choices leave an expert where it is.
    """
    count = len(loads)
    copies = [1] * count
    for _ in range(num_redundant):
        # All experts have a load, so that those of none are spread as well.
        candidates = [expert for expert in range(count) if copies[expert] < num_ranks]
        if not candidates:
            break
        copies[max(candidates, key=lambda e: ((1 + loads[e]) / copies[e], -e))] += 1
    starts = [sum(copies) * rank // num_ranks for rank in range(num_ranks + 1)]
    free = [end - start for start, end in itertools.pairwise(starts)]
    rank_loads = [0.0] * num_ranks
    owners: list[set[int]] = [set() for _ in range(count)]
    # An expert with most copies has the fewest ranks to choose from.
    order = sorted(range(count), key=lambda e: (-copies[e], -(1 + loads[e]) / copies[e], e))
    for expert in order:
        present = set(current[expert]) if current else set()
        for _ in range(copies[expert]):
            ranks = [r for r in range(num_ranks) if free[r] and r not in owners[expert]]
            if not ranks:
                break  # one copy less: those with a free place have it already
            rank = min(ranks, key=lambda r: (rank_loads[r], r not in present, r))
            owners[expert].add(rank)
            free[rank] -= 1
            rank_loads[rank] += (1 + loads[expert]) / copies[expert]
    return [tuple(sorted(ranks)) for ranks in owners]


def balancedness(loads: Sequence[int], owners: Sequence[Sequence[int]], num_ranks: int) -> float:
    """Mean load of a rank over the largest, in (0, 1]."""
    by_rank = [0.0] * num_ranks
    for load, ranks in zip(loads, owners, strict=True):
        for rank in ranks:
            by_rank[rank] += load / len(ranks)
    return sum(by_rank) / num_ranks / max(by_rank) if any(by_rank) else 1.0
