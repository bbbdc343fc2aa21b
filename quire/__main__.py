"""The command `quire`: `quire serve MODEL` and all of `manage.py`'s commands."""

from __future__ import annotations

import sys

from quire import command_line

#: Commands under vLLM's names.
NAMES = {"run-batch": "run_batch", "complete": "chat", "collect-env": "status"}


def main() -> None:
    """Run one command; without one, list them."""
    sys.argv[0] = "quire"  # the program's name in help texts, also under `python -m quire`
    if len(sys.argv) > 1:
        sys.argv[1] = NAMES.get(sys.argv[1], sys.argv[1])
    command_line.main()


if __name__ == "__main__":
    main()
