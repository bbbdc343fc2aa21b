#!/usr/bin/env python3
"""Quire's command line: `./manage.py help` lists the commands."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def main() -> None:
    """Run one management command with the repository and `platform/` on the path."""
    # `platform/` is a source root, not a package: the standard library keeps its name.
    for folder in (ROOT / "platform", ROOT):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")
    try:
        from django.core.management import execute_from_command_line
    except ImportError as error:
        raise SystemExit(
            f"Django can't be imported ({error}). Run `make up` or `make install` first."
        ) from error
    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
