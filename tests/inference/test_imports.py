"""What a gateway process must not load."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

_PROBE = """
import sys
import config.asgi
from django.urls import get_resolver
get_resolver("inference.urls").url_patterns
from engine.text.tokenizer import load_tokenizer
heavy = {"torch", "transformers", "triton", "numpy.distutils", "kernels"}
heavy = (heavy | {"opentelemetry", "psycopg"}) & set(sys.modules)
print(sorted(heavy))
sys.exit(bool(heavy))
"""


@pytest.mark.system
def test_a_gateway_loads_no_torch(tmp_path: Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'platform'}",
        "QUIRE_DATA_DIR": str(tmp_path),
        "DJANGO_SETTINGS_MODULE": "config.settings",
    }
    done = subprocess.run(
        [sys.executable, "-c", _PROBE], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_fault_33_the_gateway_asserts_nothing() -> None:
    """`python -O` drops assertions: no check may be one."""
    for path in sorted((ROOT / "inference").rglob("*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()
        assertions = [line for line in lines if line.lstrip().startswith("assert ")]
        assert assertions == [], path
