"""`python -m engine.bench.lora` tells what each case brings."""

from __future__ import annotations

import json

import pytest

from engine.bench.lora import main

from .adapters import DEMO_MODEL


def test_each_case_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [
            *("--model", DEMO_MODEL, "--batch", "2", "--requests", "2", "--tokens", "2"),
            *("--turns", "1", "--adapters", "3", "--resident", "2"),
        ]
    )
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    cases = ["off", "on_unused", "one_rank_16", "3_rank_8_uniform", "3_rank_8_zipf"]
    assert [f"{case}_tok_s" in row for case in cases] == [True] * 5
    assert row["off_of_off"] == 1.0
    assert all(row[f"{case}_tok_s"] > 0 for case in cases)
