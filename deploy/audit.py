"""Known vulnerabilities of the pinned dependencies, by pip-audit, where its data can be reached.

python deploy/audit.py [REQUIREMENTS]          asks a registry about each pin; keeps what it says
python deploy/audit.py --kept [REQUIREMENTS]   asks nobody: judges by what was kept

Exits 1 for what is known of a release that is still pinned. Without a way to the data it says so
and exits 0: who works offline can't do anything about it.
"""

import argparse
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

PINS = Path(__file__).resolve().parent.parent / "constraints.txt"
KEPT = Path(sys.prefix) / ".audit.json"
TIMEOUT_S = 300


def main(arguments: list[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("requirements", type=Path, nargs="?", default=PINS)
    parser.add_argument("--kept", action="store_true", help="ask nobody")
    parser.add_argument("--answer", type=Path, default=KEPT, help="where the answer is kept")
    args = parser.parse_args(arguments)
    answer = kept_in(args.answer) if args.kept else asked(args.requirements, args.answer)
    if answer is None:
        why = "`make audit` does" if args.kept else "pip-audit has no data here (no network)"
        print(f"Vulnerabilities weren't looked up: {why}.")
        return 0
    return judged(answer, pinned(args.requirements))


def asked(requirements: Path, kept: Path) -> dict[str, Any] | None:
    """pip-audit's answer, kept from now on; None where it has no data."""
    report = found_in(requirements)
    if report is not None:
        report["asked_at"] = datetime.now(UTC).isoformat(timespec="seconds")
        kept.write_text(json.dumps(report), encoding="utf-8")
    return report


def found_in(requirements: Path) -> dict[str, Any] | None:
    """What pip-audit reports, or None where it has no data."""
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(requirements)]
    command += ["--format", "json", "--no-deps", "--disable-pip", "--progress-spinner", "off"]
    try:
        done = subprocess.run(
            [*command, "--timeout", "5"],
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
        report: dict[str, Any] = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, json.JSONDecodeError):
        return None
    return report


def kept_in(path: Path) -> dict[str, Any] | None:
    """The last answer, or None: nobody asked, or what is there can't be read."""
    try:
        answer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return answer


def pinned(requirements: Path) -> dict[str, str]:
    """Package -> its release."""
    lines = requirements.read_text(encoding="utf-8").splitlines()
    parts = [line.partition("#")[0].partition(";")[0].partition("==") for line in lines]
    return {canonicalize_name(name.strip()): at.strip() for name, _, at in parts if at}


def judged(answer: dict[str, Any], pins: dict[str, str]) -> int:
    """Print what is known of the releases that are pinned now; 1 if it's anything bad."""
    known = {
        canonicalize_name(package["name"]): package
        for package in answer["dependencies"]
        if package.get("version") == pins.get(canonicalize_name(package["name"]))
    }
    hurt = [package for package in known.values() if package.get("vulns")]
    for package in hurt:
        for one in package["vulns"]:
            mended = ", ".join(one["fix_versions"]) or "no release yet"
            print(f"{package['name']} {package['version']}: {one['id']}, mended by {mended}")
    unknown = len(pins.keys() - known.keys())
    print(
        f"{len(known)} pins looked up at {answer['asked_at']}, "
        f"{len(hurt)} with known vulnerabilities; {unknown} never looked up."
    )
    return int(bool(hurt))


if __name__ == "__main__":
    sys.exit(main())
