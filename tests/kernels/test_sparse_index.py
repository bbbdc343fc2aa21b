"""The tokens that a query chooses, against scores in float64."""

from __future__ import annotations

import pytest
import torch

from kernels.interface import KernelSet
from tests.covering import covering

VISIBLE = [40, 33, 32, 61, 47]


@covering(indirect=["threads"], threads=[1, 2], heads=[1, 8, 11], size=[5, 16, 64])
def test_the_best_tokens_are_chosen_in_order(
    kernels: KernelSet, threads: int, heads: int, size: int
) -> None:
    queries, factors = torch.randn(5, heads, size), torch.randn(5, heads)
    keys, top_k = torch.randn(61, size), 32
    chosen = kernels.select_tokens(queries, factors, keys, torch.tensor(VISIBLE), top_k)
    products = (queries.double() @ keys.double().T * size**-0.5).relu()
    scores = torch.einsum("nh,nhm->nm", factors.double(), products)
    for row, count in enumerate(VISIBLE):
        assert chosen[row].tolist() == sorted({*chosen[row].tolist()})
        assert int(chosen[row].max()) < count
        rest = [token for token in range(count) if token not in chosen[row].tolist()]
        best = scores[row, rest].max() if rest else -torch.inf
        assert scores[row, chosen[row]].min() >= best - 1e-5
        one_row = slice(row, row + 1)
        assert torch.equal(
            kernels.select_tokens(
                queries[one_row], factors[one_row], keys[:count], torch.tensor([count]), top_k
            )[0],
            chosen[row],
        )


def test_scores_that_are_no_numbers_are_chosen_last(compiled: KernelSet) -> None:
    keys = torch.ones(40, 4)
    keys[:8] = torch.nan
    chosen = compiled.select_tokens(
        torch.ones(1, 2, 4), torch.ones(1, 2), keys, torch.tensor([40]), 32
    )
    assert chosen[0].tolist() == list(range(8, 40))


def test_without_queries_nothing_is_chosen(kernels: KernelSet) -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    chosen = kernels.select_tokens(
        torch.empty(0, 2, 4), torch.empty(0, 2), torch.ones(9, 4), nothing, 3
    )
    assert chosen.shape == (0, 3)


@pytest.mark.parametrize("visible", [[31], [62]])
def test_too_few_and_too_many_tokens_are_refused(kernels: KernelSet, visible: list[int]) -> None:
    with pytest.raises(ValueError, match="a query must choose 32"):
        kernels.select_tokens(
            torch.ones(1, 2, 4), torch.ones(1, 2), torch.ones(61, 4), torch.tensor(visible), 32
        )


def test_what_does_not_go_together_is_refused(kernels: KernelSet) -> None:
    with pytest.raises(ValueError, match="don't go together"):
        kernels.select_tokens(
            torch.ones(1, 2, 4), torch.ones(1, 2), torch.ones(61, 5), torch.tensor([40]), 32
        )
