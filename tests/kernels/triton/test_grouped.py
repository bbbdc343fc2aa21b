"""Routing, grouped products and experts in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

from kernels.triton.moe import align, fused_experts, route
from kernels.triton.moe.grouped_gemm import grouped_gemm
from tests.kernels.tolerance import assert_close

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (8, 2), (17, 5), (128, 8)])
@pytest.mark.parametrize(("first", "again"), [(True, True), (True, False), (False, True)])
def test_route(experts, top_k, first, again):
    scores = torch.randn(5, experts)
    scores[2] = 0.5  # equal scores: the lower ids
    weights, ids = route(scores, top_k, softmax_first=first, renormalize=again)
    shares = torch.softmax(scores.double(), -1)
    order = scores.sort(descending=True, stable=True).indices[:, :top_k]
    expected = shares.gather(1, order)
    if again or not first:
        expected = expected / expected.sum(-1, keepdim=True)
    assert torch.equal(ids.long(), order)
    assert_close(weights, expected, torch.float32, 2.0)


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("sigmoid", [True, False])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (17, 5), (160, 8)])
def test_route_by_sigmoids_and_biases(experts, top_k, sigmoid, biased, again):
    """A bias chooses and doesn't weigh; as DeepSeek-V3 and GLM-4.5 have it."""
    scores = torch.randn(5, experts).bfloat16()
    bias = torch.randn(experts) / 4 if biased else None
    ways = {"renormalize": again, "sigmoid": sigmoid, "choice_bias": bias, "scale": 2.5}
    weights, ids = route(scores, top_k, **ways)
    exact = scores.double()
    shares = exact.sigmoid() if sigmoid else exact.softmax(-1)
    by = shares if bias is None else shares + bias.double()
    order = by.sort(descending=True, stable=True).indices[:, :top_k]
    expected = shares.gather(1, order)
    if again:
        expected = expected / expected.sum(-1, keepdim=True)
    assert torch.equal(ids.long(), order)
    assert_close(weights, 2.5 * expected, torch.float32, 4.0)


@pytest.mark.parametrize(
    ("experts", "groups", "top_groups", "best"), [(160, 8, 3, 1), (64, 8, 4, 2), (6, 3, 1, 2)]
)
@pytest.mark.parametrize("sigmoid", [True, False])
def test_experts_are_chosen_from_the_best_groups(experts, groups, top_groups, best, sigmoid):
    """As DeepSeek V2 has it, by a group's largest probability, and V3, by two sigmoids."""
    scores, size = torch.randn(5, experts), experts // groups
    bias = torch.randn(experts) / 4 if sigmoid else None
    scores[2] = 0.5
    weights, ids = route(
        scores, 2, sigmoid=sigmoid, choice_bias=bias, renormalize=sigmoid, groups=groups,
        top_groups=top_groups, group_best=best,
    )  # fmt: skip
    shares = scores.double().sigmoid() if sigmoid else scores.double().softmax(-1)
    by = shares if bias is None else shares + bias.double()
    for row in range(5):
        sums = by[row].view(groups, size).sort(descending=True).values[:, :best].sum(-1)
        open_ones = sums.sort(descending=True, stable=True).indices[:top_groups].tolist()
        allowed = [e for e in range(experts) if e // size in open_ones]
        chosen = sorted(allowed, key=lambda e: (-float(by[row, e]), e))[:2]
        assert ids[row].tolist() == chosen
        expected = shares[row, chosen]
        if sigmoid:
            expected = expected / expected.sum()
        assert_close(weights[row], expected, torch.float32, 4.0)


def test_groups_that_cannot_be_are_refused():
    for invalid in ({"groups": 4}, {"groups": 3, "top_groups": 4}, {"groups": 3},
                  {"groups": 3, "top_groups": 2, "group_best": 3}):  # fmt: skip
        with pytest.raises(ValueError, match="groups"):
            route(torch.randn(2, 9), 4, **invalid)


def test_sigmoids_that_are_all_nothing_weigh_nothing():
    weights, _ = route(torch.full((2, 9), -200.0), 3, sigmoid=True)
    assert (weights == 0).all()
    with pytest.raises(ValueError, match="choice_bias"):
        route(torch.randn(2, 9), 3, choice_bias=torch.randn(8))


def test_scores_that_are_no_numbers_still_name_experts_that_are_there():
    scores = torch.full((2, 6), float("nan"))
    scores[1] = torch.randn(6)
    for groups in (1, 3):
        weights, ids = route(scores, 2, groups=groups)
        assert ((ids >= 0) & (ids < 6)).all()
    assert weights[0].isnan().any()
    assert weights[1].isfinite().all()


@pytest.mark.parametrize("tokens", [1, 6])
def test_experts_that_nobody_chose_and_a_token_that_is_broken(tokens):
    """All go to one expert of many, and a row of NaN stays one, alone."""
    x = torch.randn(tokens, 32)
    up, down = torch.randn(9, 48, 32), torch.randn(9, 32, 24)
    scores = torch.full((tokens, 9), -20.0)
    scores[:, 7] = 20.0
    if tokens > 1:
        x[2] = scores[2] = float("nan")
    got = fused_experts(x, up, down, *route(scores, 1))
    both = x.double() @ up[7].double().T
    expected = (torch.nn.functional.silu(both[:, :24]) * both[:, 24:]) @ down[7].double().T
    good = torch.arange(tokens) != 2
    assert_close(got[good], expected[good], torch.float32, 16.0)
    assert not got[~good].isfinite().any()


def test_route_refuses_more_than_there_are():
    with pytest.raises(ValueError, match="best 3"):
        route(torch.randn(2, 2), 3)


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 150])
@pytest.mark.parametrize("groups", [1, 3, 9])
def test_align_sorts_stably_and_pads(rows, groups):
    ids = torch.randint(-1, groups, (rows,), dtype=torch.int32)
    match = align(ids, groups, 16)
    order, seen = match.order.view(-1, 16), []
    for tile, group in zip(order, match.group.tolist()):
        retained_tensor = tile[tile < rows]
        assert (group >= 0) == (len(retained_tensor) > 0)
        assert (ids[retained_tensor.long()] == group).all()
        seen += retained_tensor.tolist()
    expected = [r for g in range(groups) for r in (ids == g).nonzero().squeeze(-1).tolist()]
    assert seen == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 1, 1), (17, 40, 33), (5, 32, 64)])
def test_grouped_gemm(dtype, rows, columns, depth):
    x = torch.randn(rows, depth).to(dtype)
    matrices, bias = torch.randn(3, columns, depth).to(dtype), torch.randn(3, columns)
    ids = torch.randint(-1, 3, (rows,), dtype=torch.int32)
    scales = torch.rand(rows)
    got = grouped_gemm(x, matrices, align(ids, 3, 16), bias=bias, scales=scales, factor=0.5)
    expected = torch.zeros(rows, columns, dtype=torch.float64)
    for row, group in enumerate(ids.tolist()):
        if group >= 0:
            product = 0.5 * matrices[group].double() @ x[row].double() + bias[group].double()
            expected[row] = product * float(scales[row])
    assert_close(got, expected, dtype, 8.0)


def test_what_does_not_go_together_is_refused():
    groups = align(torch.zeros(4, dtype=torch.int32), 2, 16)
    matrices = torch.randn(2, 8, 6)
    with pytest.raises(ValueError, match="x "):
        grouped_gemm(torch.randn(4, 5), matrices, groups)
    with pytest.raises(ValueError, match="x "):
        grouped_gemm(torch.randn(3, 6), matrices, groups)
    with pytest.raises(ValueError, match="bias"):
        grouped_gemm(torch.randn(4, 6), matrices, groups, bias=torch.randn(2, 7))
    with pytest.raises(ValueError, match="out"):
        grouped_gemm(torch.randn(4, 6), matrices, groups, out=torch.empty(4, 7))
    with pytest.raises(ValueError, match="ids"):
        align(torch.zeros(4, dtype=torch.int64), 2, 16)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("tokens", "top_k"), [(0, 2), (1, 1), (17, 3)])
def test_fused_experts(tokens, top_k, activation):
    hidden, inner, experts = 40, 24, 5
    x = torch.randn(tokens, hidden)
    up, down = torch.randn(experts, 2 * inner, hidden), torch.randn(experts, hidden, inner)
    up_bias, down_bias = torch.randn(experts, 2 * inner), torch.randn(experts, hidden)
    weights, ids = route(torch.randn(tokens, experts), top_k)
    got = fused_experts(
        x, up, down, weights, ids, activation=activation, gate_up_bias=up_bias,
        down_bias=down_bias,
    )  # fmt: skip
    act = {
        "silu": torch.nn.functional.silu,
        "gelu_tanh": lambda z: torch.nn.functional.gelu(z, approximate="tanh"),
    }[activation]
    expected = torch.zeros(tokens, hidden, dtype=torch.float64)
    for token in range(tokens):
        for weight, expert in zip(weights[token].tolist(), ids[token].tolist()):
            both = up[expert].double() @ x[token].double() + up_bias[expert].double()
            inside = act(both[:inner]) * both[inner:]
            out = down[expert].double() @ inside + down_bias[expert].double()
            expected[token] += weight * out
    assert_close(got, expected, torch.float32, 16.0)
