"""Runs the matrix; with `--write` writes docs/features.md, else says what it would hold."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import django


def main() -> int:
    """Run all pairs."""
    parser = argparse.ArgumentParser(prog="python -m tests.features", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/features.md")
    write = parser.parse_args().write
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")
    django.setup()
    # Gateways' parsers want Django's settings first.
    from tests.features import page
    from tests.features.guesses import guessing
    from tests.features.lab import Lab
    from tests.features.matrix import PAIRS, outcome

    with tempfile.TemporaryDirectory() as folder, guessing() as guesses:
        lab = Lab(Path(folder), guesses)
        text = page.text({pair: outcome(lab, *pair) for pair in PAIRS})
    if write:
        page.PATH.write_text(text, encoding="utf-8")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2] / "platform"))
    sys.exit(main())
