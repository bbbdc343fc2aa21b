"""The command `quire`: `quire serve MODEL` and all of `manage.py`'s commands."""

from __future__ import annotations

import sys

from quire import command_line


def main() -> None:
    """Run one command; without one, list them."""
    sys.argv[0] = "quire"  # the program's name in help texts, also under `python -m quire`
    command_line.main()


if __name__ == "__main__":
    main()
