"""A real replica that takes drafts for free, so that all that are found are checked.

In the place of `chaos.behind_relay`, as which it's run. By default few drafts would pay of
the demo model's, at so many streams. Without speculation nothing is another.
"""

import os
import sys

NAME = "QUIRE_CHAOS_RELAY"


class Replaced:
    """To import pytest's own would take a tenth of the start."""

    setattr = staticmethod(setattr)


if __name__ == "__main__":
    from engine.serving.__main__ import main  # first: the collector rests while it's imported
    from tests.engine.speculative.free import make_drafts_free

    make_drafts_free(Replaced)  # type: ignore[arg-type]
    flags = [flag for flag in sys.argv[1:] if not flag.startswith("--redis-url=")]
    sys.exit(main([*flags, f"--redis-url={os.environ[NAME]}"]))
