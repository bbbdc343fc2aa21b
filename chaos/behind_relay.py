"""Starts a replica that reaches Redis through the relay; run as a script with a replica's flags."""

import os
import sys

NAME = "QUIRE_CHAOS_RELAY"

if __name__ == "__main__":
    flags = [flag for flag in sys.argv[1:] if not flag.startswith("--redis-url=")]
    flags.append(f"--redis-url={os.environ[NAME]}")
    os.execv(sys.executable, [sys.executable, "-m", "engine.serving", *flags])  # noqa: S606 - us
