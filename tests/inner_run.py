"""A run of pytest inside a test: of a small suite, with this one's hooks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_pytest(
    folder: Path, *flags: str, without: Iterable[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run the tests in a folder, which may import `tests`.

    Args:
        folder: where it runs.
        flags: of pytest.
        without: plugins that are left out.
    """
    left_out = [flag for name in without for flag in ("-p", f"no:{name}")]
    known = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "DJANGO_"))}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *left_out, *flags],
        cwd=folder,
        env=known | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
