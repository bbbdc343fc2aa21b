"""`python -m engine.entrypoints.cli.main COMMAND`: `quire COMMAND` by vLLM's path."""

import sys

from engine.entrypoints.launch import exec_quire


def main() -> None:
    """Run the command line's command."""
    exec_quire(sys.argv[1:])


if __name__ == "__main__":
    main()
