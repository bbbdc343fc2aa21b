"""The first hour on a GPU: its steps are those of the docs, and none stops the others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.gpu.first_hour import STEPS, Step, main, run

ROOT = Path(__file__).parents[3]


def test_steps_name_what_there_is() -> None:
    for step in STEPS:
        for word in step.command:
            assert not word.startswith("tests/") or (ROOT / word).exists()
        module = step.command[step.command.index("-m") + 1]
        assert module == "pytest" or (ROOT / f"{module.replace('.', '/')}.py").is_file()


def test_the_docs_name_every_step() -> None:
    page = " ".join((ROOT / "docs/kernels.md").read_text().split())
    assert "python -m tests.gpu.first_hour" in page
    for step in STEPS:
        *_, option, value = step.command
        quoted = f'"{value}"' if " " in value else value
        assert f"{option} {quoted}" in page, step


def test_what_becomes_of_a_step(tmp_path: Path) -> None:
    def became(*command: str, seconds: float = 60) -> str:
        return run(Step("0", command, empty_cache=True), tmp_path, {"A": "1"}, seconds)

    seen = "import os; print(os.environ['A'], os.listdir(os.environ['TRITON_CACHE_DIR']))"
    assert became("python", "-c", seen) == "ok"
    assert (tmp_path / "0.txt").read_text() == "1 []\n"
    assert became("python", "-c", "raise SystemExit(3)") == "failed (3)"
    assert became("python", "-c", "import time; time.sleep(60)", seconds=0.1) == "took over 0.1 s"
    assert became("no-such-program") == "no-such-program isn't installed"


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["first_hour"])
    assert main() == 2
    assert capsys.readouterr().err == "torch sees no CUDA device.\n"
    monkeypatch.setattr(sys, "argv", ["first_hour", "--list", "--only", "6"])
    assert main() == 0
    listed = capsys.readouterr().out
    assert listed.startswith("6  TRITON_CACHE_DIR=$(mktemp -d) python -m pytest -m gpu")
    assert listed.count("\n") == 1
