"""The product of low-rank adapters, row by row against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.lora import LoraSegment, add_lora
from tests.kernels.tolerance import assert_close

TOKENS, WIDTH, OUT = 23, 48, 40
SPANS = [(0, 1, 8), (1, 9, 1), (12, 12, 4), (12, 20, 33)]
"""From row, to row, rank: rows 9 to 11 and the last three have no adapter, one adapter no rows."""


def segments(dtype: torch.dtype) -> list[LoraSegment]:
    return [
        LoraSegment(
            start, end, torch.randn(rank, WIDTH).to(dtype), torch.randn(OUT, rank).to(dtype),
            scale=0.5 + start,
        )
        for start, end, rank in SPANS
    ]  # fmt: skip


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_gets_what_its_adapter_adds(dtype: torch.dtype, weights: torch.dtype) -> None:
    torch.manual_seed(0)
    parts = segments(weights)
    x, y = torch.randn(TOKENS, WIDTH).to(dtype), torch.randn(TOKENS, OUT).to(dtype)
    expected = y.double()
    for part in parts:
        for row in range(part.start, part.end):
            low = [torch.dot(x[row].double(), line) for line in part.a.double()]
            expected[row] += part.scale * part.b.double() @ torch.stack(low)
    initial_copy = y.clone()
    add_lora(y, x, parts)
    assert_close(y, expected, dtype, 60.0)
    for row in (*range(9, 12), *range(20, TOKENS)):
        assert torch.equal(y[row], initial_copy[row])


def test_float64_stays_float64() -> None:
    torch.manual_seed(0)
    (part,) = segments(torch.float32)[-1:]
    x, y = (torch.randn(TOKENS, width, dtype=torch.float64) for width in (WIDTH, OUT))
    expected = y[12:20] + part.scale * x[12:20] @ part.a.double().T @ part.b.double().T
    add_lora(y, x, [part])
    torch.testing.assert_close(y[12:20], expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"start": -1}, r"segment \[-1, 3\) must lie behind row 0 of 5"),
        ({"end": 6}, r"segment \[1, 6\) must lie"),
        ({"start": 4}, r"segment \[4, 3\) must lie"),
        ({"a": torch.zeros(2, 4)}, r"a .* must be \[rank, 3\]"),
        ({"b": torch.zeros(4, 3)}, r"b .* must be \[4, 2\] like a"),
        ({"b": torch.zeros(4, 2).bfloat16()}, r"b .* must be \[4, 2\] like a"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    changes: dict[str, Any], words: str
) -> None:
    first = LoraSegment(0, 0, torch.ones(1, 3), torch.ones(4, 1))
    segment_fields: dict[str, Any] = {
        "start": 1,
        "end": 3,
        "a": torch.ones(2, 3),
        "b": torch.ones(4, 2),
    }
    y = torch.zeros(5, 4)
    with pytest.raises(ValueError, match=words):
        add_lora(y, torch.ones(5, 3), [first, LoraSegment(**{**segment_fields, **changes})])
    assert not y.any()


def test_rows_of_two_adapters_are_refused() -> None:
    part = LoraSegment(0, 2, torch.ones(1, 3), torch.ones(4, 1))
    with pytest.raises(ValueError, match="behind row 2"):
        add_lora(torch.zeros(5, 4), torch.ones(5, 3), [part, part])
    with pytest.raises(ValueError, match="same number"):
        add_lora(torch.zeros(4, 4), torch.ones(5, 3), [part])
