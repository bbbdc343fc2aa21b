"""Runs the conformance checks and writes the table of docs/devices.md: `python -m
tests.engine.devices [DEVICE ...]`, by default all devices.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.packages import DEVICE, install, install_tenstorrent

ROOT = Path(__file__).parents[3]
DEVICES = ("cpu", "toy", "openvino", "tt", "jax-cpu")
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


def read_table() -> dict[str, dict[str, str]]:
    """Device -> check -> outcome, of docs/devices.md."""
    text = PAGE.read_text()
    lines = [line for line in text[text.index("| check |") :].splitlines() if line.startswith("| ")]
    (_, *devices), *table = [
        [cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines
    ]
    return {
        device: {row[0]: row[column] for row in table if row[column] != "-"}
        for column, device in enumerate(devices, start=1)
    }


def main() -> None:
    """Write the table, which is the end of the page, with new columns of the named devices."""
    devices = sys.argv[1:] or DEVICES
    columns = read_table()
    with tempfile.TemporaryDirectory() as folder:
        installed = install(DEVICE, Path(folder))
        for name in ("openvino", "jax-cpu"):
            install(DEVICE.with_name(name), installed)
        install_tenstorrent(installed)
        columns |= {device: run_checks(device, installed) for device in devices}
    checks = dict.fromkeys(check for column in columns.values() for check in column)
    lines = [
        "| check | " + " | ".join(f"`{device}`" for device in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
        *(
            f"| {check} | "
            + " | ".join(column.get(check, "-") for column in columns.values())
            + " |"
            for check in checks
        ),
    ]
    prose = PAGE.read_text().partition("| check |")[0]
    table = "\n".join(lines)
    PAGE.write_text(f"{prose}{table}\n\n<!-- conformance: end -->\n")


if __name__ == "__main__":
    main()
