"""Rules of the house that a process of its own shows; ruff and import contracts hold the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.system


def test_fault_33_bad_values_are_refused_under_python_o() -> None:
    script = (
        "from engine import SamplingParams\n"
        "from engine.contract.engine_config import EngineConfig\n"
        "for make in (lambda: SamplingParams(temperature=-1), lambda: SamplingParams(n=0),\n"
        "             lambda: EngineConfig(model='m', block_size=3)):\n"
        "    try:\n"
        "        make()\n"
        "    except ValueError as error:\n"
        "        print(error.param)\n"
    )
    done = subprocess.run(
        [sys.executable, "-O", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["temperature", "n", "block_size"]


def test_the_engines_face_loads_no_torch() -> None:
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    print(name, 'torch' in sys.modules)\n"
    )
    modules = ["engine", "engine.contract.messages", "engine.contract.engine_config", "engine.text"]
    done = subprocess.run(
        [sys.executable, "-c", script, *modules],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [f"{name} False" for name in modules]
