"""Checking a version in a process of its own, before any engine sees it.

The program is the engine's: it reads header, shapes, rank and numbers, says what it found, and then
lets a few prompts through the adapter and through a plain merge. Storeys above the engine run it
and read its JSON objects; they never load torch.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from django.conf import settings

from catalog.processes import spawn

logger = logging.getLogger(__name__)

TIMEOUT_S = 1800.0
POLL_S = 0.1
_ROOT = Path(__file__).resolve().parent.parent.parent


class CheckLost(Exception):
    """Nobody wants the result any more."""


def run_check(
    model: str,
    adapter: Path,
    *,
    wanted: Callable[[], bool] = lambda: True,
    read: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """The check's report: `ok`, `error`, `digest`, `rank`, `target_modules`, and so on; with what
    came of prompts as `probe`.

    Args:
        model: the base model's folder or hub id. adapter: a folder or a GGUF file.
        wanted: asked now and then; False ends the program.
        read: called once when all but prompts has been looked at and is well.
    Raises: `CheckLost`.
    """
    program = settings.QUIRE["ADAPTER_CHECK_COMMAND"] or [sys.executable, "-m", "engine.lora.check"]
    command = [*program, "--model", model, "--adapter", str(adapter), "--probe"]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as said:
        child = spawn(command, name="adapter check", cwd=str(_ROOT), stdout=out, stderr=said)
        started, is_read = time.monotonic(), False
        try:
            while (status := child.wait(POLL_S)) is None:
                if time.monotonic() - started > TIMEOUT_S:
                    return refusal(f"The check took more than {TIMEOUT_S / 60:.0f} minutes.")
                if not wanted():
                    raise CheckLost
                if not is_read and (is_read := _is_well(out)):
                    read()
        finally:
            child.kill()
        out.seek(0)
        said.seek(0)
        report = _report(out.read().decode("utf-8", "replace"))
        if report is None or (passed(report) and report.get("probe") is None):
            tail = said.read().decode("utf-8", "replace")[-2000:]
            logger.error("the check of %s ended with status %s: %s", adapter, status, tail)
            return refusal(
                f"The check ended without a result (status {status}). The worker's log says more."
            )
    return report


def _is_well(out: IO[bytes]) -> bool:
    """Whether the first report is there. The file's position is the child's, and stays."""
    found = _report(os.pread(out.fileno(), 1 << 20, 0).decode("utf-8", "replace"))
    return found is not None and passed(found)


def refusal(message: str) -> dict[str, Any]:
    """A report that says no."""
    return {"ok": False, "error": {"message": message, "param": None}}


def passed(report: dict[str, Any]) -> bool:
    """Whether it may answer: the check is well, and so is the probe if there was one."""
    probe = report.get("probe")
    return bool(report.get("ok")) and (not isinstance(probe, dict) or bool(probe.get("passed")))


def _report(text: str) -> dict[str, Any] | None:
    """The last line that is a JSON object: libraries may print before it."""
    for line in reversed(text.strip().splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and "ok" in found:
            return found
    try:
        whole = json.loads(text)
    except ValueError:
        return None
    return whole if isinstance(whole, dict) and "ok" in whole else None
