"""The command `quire`: `quire serve MODEL` and all of `manage.py`'s commands."""

from __future__ import annotations

import sys

import manage

#: Commands under vLLM's names.
NAMES = {"run-batch": "run_batch", "complete": "chat", "collect-env": "status"}


def main() -> None:
    """Run one command; without one, list them."""
    if len(sys.argv) > 1:
        sys.argv[1] = NAMES.get(sys.argv[1], sys.argv[1])
    manage.main()


if __name__ == "__main__":
    main()
