"""Known vulnerabilities of the pinned dependencies, by pip-audit, where its data can be reached.

python deploy/audit.py [REQUIREMENTS]

Exits 1 for what it finds. Without a way to the data it says so and exits 0: who works offline can't
do anything about it.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PINS = Path(__file__).resolve().parent.parent / "constraints.txt"
TIMEOUT_S = 300


def main() -> int:
    """The exit status."""
    report = found_in(Path(sys.argv[1]) if len(sys.argv) > 1 else PINS)
    if report is None:
        print("Vulnerabilities weren't looked up: pip-audit has no data here (no network).")
        return 0
    hurt = [package for package in report["dependencies"] if package.get("vulns")]
    for package in hurt:
        for one in package["vulns"]:
            mended = ", ".join(one["fix_versions"]) or "no release yet"
            print(f"{package['name']} {package['version']}: {one['id']}, mended by {mended}")
    print(f"{len(report['dependencies'])} dependencies, {len(hurt)} with known vulnerabilities.")
    return int(bool(hurt))


def found_in(pins: Path) -> dict[str, Any] | None:
    """What pip-audit reports, or None where it has no data."""
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(pins), "--format", "json"]
    command += ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--timeout", "5"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
        report: dict[str, Any] = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, json.JSONDecodeError):
        return None
    return report


if __name__ == "__main__":
    sys.exit(main())
