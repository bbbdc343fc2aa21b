"""Runs the conformance checks on all devices and writes the table of docs/devices.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.packages import DEVICE, install

ROOT = Path(__file__).parents[3]
DEVICES = ("cpu", "toy", "openvino")
PAGE = ROOT / "docs" / "devices.md"


def run_checks(device: str, folder: Path) -> dict[str, str]:
    """Check -> status, with the packages of `folder` installed."""
    done = subprocess.run(
        [sys.executable, "-m", "engine.devices.conformance", device, "--json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])},
    )
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    return {outcome["check"]: outcome["status"] for outcome in outcomes}


def main() -> None:
    """Write the table, which is the end of the page."""
    with tempfile.TemporaryDirectory() as folder:
        installed = install(DEVICE, Path(folder))
        install(DEVICE.with_name("openvino"), installed)
        columns = [run_checks(device, installed) for device in DEVICES]
    checks = dict.fromkeys(check for column in columns for check in column)
    lines = [
        "| check | " + " | ".join(f"`{device}`" for device in DEVICES) + " |",
        "|---" * (len(DEVICES) + 1) + "|",
        *(
            f"| {check} | " + " | ".join(column.get(check, "-") for column in columns) + " |"
            for check in checks
        ),
    ]
    prose = PAGE.read_text().partition("| check |")[0]
    PAGE.write_text(prose + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
