"""A minute of `manage.py chaos`, as a person runs it."""

from __future__ import annotations

import subprocess
import sys

from config.chaos.faults import CLOCK, FAULTS
from tests.e2e.product import ROOT, clean_environment

#: Processes whose clock can be set read it a little more slowly.
DONE = [part for name in FAULTS if name != CLOCK for part in ("--fault", name)]


def test_a_minute_of_faults_hurts_nobody() -> None:
    done = subprocess.run(
        [sys.executable, "manage.py", "chaos", "--minutes", "1", "--seed", "1", *DONE],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 lost, 0 doubled, 0 changed." in done.stdout
    assert "Difference: 0." in done.stdout
