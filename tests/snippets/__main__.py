"""`python -m tests.snippets FILE ...`: a table of what becomes of each snippet of these texts."""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path

from tests.snippets.extract import read_snippets
from tests.snippets.run import Runner
from tests.snippets.world import make_environment, make_hub


def main() -> None:
    """Print a row of Markdown a snippet as they end. FILE:LINE-LINE names a part of a text."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # its server must end too
    with tempfile.TemporaryDirectory(prefix="q-") as name:
        folder = Path(name)
        with make_hub(folder / "hub") as hub:
            (folder / "world").mkdir()
            runner = Runner(folder / "world", make_environment(folder / "world", hub))
            try:
                for word in sys.argv[1:]:
                    _run_text(runner, word)
            finally:
                runner.close()


def _run_text(runner: Runner, word: str) -> None:
    path, _, part = word.partition(":")
    first, _, last = part.partition("-")
    for snippet in read_snippets(Path(path)):
        if int(first or 0) <= snippet.line <= int(last or sys.maxsize):
            outcome = runner.run(snippet)
            if outcome.detail != "no program":
                detail = outcome.detail.replace("|", "\\|")[:300]
                print(
                    f"| {snippet.document[:3]}:{snippet.line} {snippet.example} | {snippet.kind} "
                    f"| {outcome.status} | {detail} | {outcome.seconds:.1f} |",
                    flush=True,
                )


main()
