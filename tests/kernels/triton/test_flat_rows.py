"""Rows whose filters leave more logits than are sorted at once, against float64."""

from __future__ import annotations

import importlib

import pytest
import torch

from kernels.reference import sampling as reference
from kernels.triton.launch import launch
from kernels.triton.sampling import sample
from tests.kernels.test_sampling import settings

module = importlib.import_module("kernels.triton.sampling.sample")
VOCAB = 330


def rows_of(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(kind))
    logits = torch.randn(3, VOCAB, generator=generator)
    if kind == "rounded":  # as logits of bfloat16 are: few values, each many times
        return (logits * 2).round() / 2
    if kind == "sided":  # all that is kept lies in the last pieces
        return logits + torch.linspace(-8, 8, VOCAB)
    return logits


@pytest.mark.parametrize("kind", ["smooth", "rounded", "sided"])
def test_every_filter_draws_what_sorting_draws(kind):
    ways = [{"top_p": 0.95}, {"top_k": 170, "top_p": 0.8}, {"top_p": 0.9, "min_p": 1e-3}]
    row_settings = [
        settings(1, temperature=3.0, seed=index, **way) for index, way in enumerate(ways)
    ]
    chosen = {name: torch.cat([one[name] for one in row_settings]) for name in row_settings[0]}
    logits = rows_of(kind)
    assert sample(logits, **chosen).tolist() == reference.sample(logits, **chosen).tolist()


def test_a_border_among_equal_logits_keeps_the_lowest_ids():
    """At both ends of the unit interval: the first and the last of what is kept."""
    logits = torch.zeros(4, VOCAB)
    chosen = settings(4)
    chosen["uniforms"] = torch.tensor([0.0, 1 - 2**-53] * 2, dtype=torch.float64)
    chosen["top_p"] = torch.tensor([0.5, 0.5, 1.0, 1.0], dtype=torch.float64)
    chosen["top_k"] = torch.tensor([VOCAB, VOCAB, 200, 200])
    assert sample(logits, **chosen).tolist() == [0, VOCAB // 2 - 1, 0, 199]


def test_pieces_of_a_row_are_sorted_by_programs_of_their_own_and_beside_any_row(monkeypatch):
    """What they say of a row has the same bits alone as beside others, and one search follows."""
    seen = []

    def watched(kernel, grid, *args, **options):
        launch(kernel, grid, *args, **options)
        if kernel is module.sort_kernel:
            seen.append((grid, [part[-1].clone() for part in args[:3]]))

    monkeypatch.setattr(module, "launch", watched)
    logits = torch.cat([torch.randn(1, VOCAB) * 30, rows_of("rounded")])
    chosen = settings(4, top_p=0.95, temperature=3.0)
    together = sample(logits, **chosen)
    isolated_sample = sample(logits[-1:], **{name: values[-1:] for name, values in chosen.items()})
    assert isolated_sample.tolist() == together[-1:].tolist()
    chunks = -(-VOCAB // module.CHUNK)
    (grid, parts), (grid_isolated, parts_isolated) = seen
    assert (grid, grid_isolated) == ((chunks, 4), (chunks, 1))
    assert all(torch.equal(one, other) for one, other in zip(parts, parts_isolated, strict=True))
    ordered, _, sums = parts
    assert (ordered.view(chunks, -1).diff() <= 0).all()
    weights = ((logits[-1].double() - logits[-1].max()) / 3.0).exp()
    torch.testing.assert_close(sums.view(chunks, -1)[:, -1].sum(), weights.sum(), rtol=1e-6, atol=0)
