"""`python -m engine.entrypoints.openai.api_server --model MODEL`: `quire serve` by vLLM's path."""

import sys

from engine.entrypoints.launch import exec_quire


def main() -> None:
    """Become `quire serve` with this command line."""
    exec_quire(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    main()
