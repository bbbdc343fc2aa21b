"""The GPU benchmark runs, in small, where there's no GPU; and its arithmetic is right."""

from __future__ import annotations

import json

import pytest

from benchmarks import gpu
from benchmarks.gpu import GOALS, SHAPE, prefill_flops, run, smoke_sizes


def test_every_figure_has_its_row() -> None:
    lines: list[str] = []
    run(lines.append, sizes=smoke_sizes())
    ceilings, *rows = [json.loads(line) for line in lines]
    assert min(ceilings.values()) > 0
    rows_by_figure = {row["figure"]: row for row in rows}
    assert list(rows_by_figure) == [
        "one stream, graphs", "3 streams, graphs", "prefill of 64", "sampling of 3",
        "one stream, eager", "3 streams, eager", "3 streams, eager / graphs",
        "transformers, one stream",
    ]  # fmt: skip
    assert rows_by_figure["one stream, graphs"]["goal"] == GOALS["one stream"] == 0.90
    assert rows_by_figure["3 streams, eager / graphs"]["same_tokens"] == 1
    numbers = [v for row in rows for k, v in row.items() if k != "figure"]
    assert all(isinstance(number, float | int) for number in numbers)


def test_the_arithmetic_of_a_prompt() -> None:
    """8B: 6.98 G parameters in the layers' products; 32 layers, 4096 wide, of attention."""
    weights = 32 * (4096 * 4096 * 2.5 + 3 * 4096 * 14336)
    assert prefill_flops(SHAPE, 1) == pytest.approx(2 * weights + 32 * 2 * 4096)
    assert weights == pytest.approx(6.98e9, rel=0.01)
    assert prefill_flops(SHAPE, 8192) == pytest.approx(2 * weights * 8192 + 32 * 2 * 4096 * 8192**2)


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["bench"])
    assert gpu.main() == 2
    assert "no CUDA device" in capsys.readouterr().err
