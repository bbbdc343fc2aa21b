"""Measures what the gateway itself costs. Run `python -m tests.inference.bench --help`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "platform")]
