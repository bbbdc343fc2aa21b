"""Two engines in processes of their own, in turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import compare
from benchmarks.compare import LOADS, Row, main

Folder = Callable[[str], Path]
SMALL = ["--settings", "num_gpu_blocks_override=200", "num_threads=1"]


def test_settings_are_compared_in_turns(
    model_folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(model_folder("llama"))
    other = ("--b", "cpu_kernels=false", "QUIRE_KERNELS=reference")
    main([folder, *SMALL, *other, "--turns", "2", "--loads", "one"])
    _, wall, processor = capsys.readouterr().out.splitlines()
    assert wall.split()[:2] == ["one", "wall"]
    assert processor.split()[:2] == ["one", "processor"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--b", "dtype=float8"], "float8"),
        (["--checkout-a", "/nowhere"], "/nowhere is no checkout"),
        (["--b", "nonsense"], "'nonsense' must be NAME=VALUE"),
    ],
)
def test_an_engine_that_does_not_start_says_why(
    options: list[str], message: str, model_folder: Folder
) -> None:
    with pytest.raises(SystemExit, match=message):
        main([str(model_folder("llama")), *SMALL, *options])


def test_unknown_loads_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["model", "--loads", "one,some"])
    message = f"--loads must be of {', '.join(LOADS)}; got some"
    assert message in capsys.readouterr().err


def test_ratios_are_of_each_turn() -> None:
    row = Row("one", "wall", [1.0, 2.0, 4.0], [2.0, 2.0, 2.0])
    assert row.ratios == [2.0, 1.0, 0.5]
    assert compare._spread(row.ratios, "{:.2f}".format) == "1.00 (0.75 to 1.50)"
