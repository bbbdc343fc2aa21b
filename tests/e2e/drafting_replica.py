"""A real replica that takes drafts for free, so that all that are found are checked.

In the place of `config.chaos.behind_relay`, as which it's run. By default few drafts would pay of
the demo model's, at so many streams. Without speculation nothing is another.
"""

import os
import sys

NAME = "QUIRE_CHAOS_RELAY"
_PROGRAM = """
import sys
from engine.serving.__main__ import main  # first: the collector rests while it's imported
from tests.engine.speculative.free import make_drafts_free
class Replaced:  # to import pytest's own would take a tenth of the start
    setattr = staticmethod(setattr)
make_drafts_free(Replaced)
sys.exit(main())
"""

if __name__ == "__main__":
    flags = [flag for flag in sys.argv[1:] if not flag.startswith("--redis-url=")]
    flags.append(f"--redis-url={os.environ[NAME]}")
    os.execv(sys.executable, [sys.executable, "-c", _PROGRAM, *flags])
