"""`python -m engine.devices.conformance DEVICE`: what a device does, refuses and does wrong."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from engine.contract.errors import ConfigError, InvalidRequest
from engine.devices.conformance.checks import Bench, Check, ConformanceError, all_checks


@dataclass(frozen=True, slots=True)
class Outcome:
    """`status`: "passed", "refused" or "failed". `detail`: why, or a figure."""

    check: str
    status: str
    detail: str = ""
    seconds: float = 0.0


def run_check(check: Check, bench: Bench) -> Outcome:
    """Run one check, catching everything that the device raises."""
    started = time.perf_counter()
    try:
        status, detail = "passed", check.run(bench) or ""
    except ConformanceError as error:
        status, detail = "failed", str(error)
    except (ConfigError, InvalidRequest) as error:
        status, detail = "refused", error.message
    except Exception as error:  # a package's methods may raise anything
        status, detail = (
            "failed",
            f"{type(error).__name__}: {error}{_raised_in(error.__cause__ or error)}",
        )
    seconds = time.perf_counter() - started
    return Outcome(check.name, status, " ".join(detail.split())[:300], round(seconds, 2))


def _raised_in(error: BaseException) -> str:
    """The innermost function outside of Quire and torch, or of all."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append((code.co_filename, code.co_qualname))
        trace = trace.tb_next
    foreign = [
        frame for frame in frames if "/torch/" not in frame[0] and "/engine/" not in frame[0]
    ]
    name, function = (foreign or frames)[-1]
    return f" (in {function}, {Path(name).name})"


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1 where a check failed, 2 for a device that isn't there."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.devices.conformance",
        description="Check a device against transformers, with tiny models. Refusals are said; a "
        "wrong answer or an error that isn't a refusal is a failure.",
    )
    parser.add_argument("device", help="as --device names it, such as cpu")
    parser.add_argument("--only", metavar="WORDS", default="", help="checks whose names have these")
    parser.add_argument("--json", action="store_true", help="a JSON object a line")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    disable_progress_bar()
    try:
        checks = [check for check in all_checks(options.device) if options.only in check.name]
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        return 2
    if not options.json:
        print("| check | | |\n|---|---|---|")
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="quire-conformance-") as folder:
        bench = Bench(options.device, Path(folder))
        for check in checks:
            outcomes.append(run_check(check, bench))
            print(_line(outcomes[-1], as_json=options.json), flush=True)
    counts = {
        status: sum(outcome.status == status for outcome in outcomes)
        for status in ("passed", "refused", "failed")
    }
    if not options.json:
        print("\n" + ", ".join(f"{count} {status}" for status, count in counts.items()))
    return int(counts["failed"] > 0)


def _line(outcome: Outcome, *, as_json: bool) -> str:
    if as_json:
        return json.dumps(asdict(outcome))
    mark = {"passed": "✓", "refused": "refused", "failed": "**failed**"}[outcome.status]
    return f"| {outcome.check} | {mark} | {outcome.detail} |"


if __name__ == "__main__":
    sys.exit(main())
