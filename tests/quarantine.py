"""Tests that fail now and then, by name. `python -m tests.quarantine` fails for what stays long.

A line of quarantine.txt is `id | reason | date of entry`.
"""

from __future__ import annotations

import sys
from datetime import date
from pathlib import Path

FILE = Path(__file__).with_name("quarantine.txt")
MAX_DAYS = 14


def read() -> dict[str, date]:
    """Test id -> date of entry. Raises ValueError for a line of another form."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    rows = [line.split(" | ") for line in lines if line and not line.startswith("#")]
    return {test: date.fromisoformat(entered) for test, _, entered in rows}


if __name__ == "__main__":
    overdue = [test for test, day in read().items() if (date.today() - day).days > MAX_DAYS]
    sys.exit("\n".join(f"more than {MAX_DAYS} days in quarantine: {test}" for test in overdue) or 0)
