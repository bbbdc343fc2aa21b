"""One replica as a process: `python -m engine.serving --replica-id ID --model FOLDER`."""

# ruff: noqa: E402 - the collector rests while modules are imported

import gc
import sys

# They stay: looking through them for garbage meanwhile takes a tenth of that time.
gc.disable()

from engine.system.light_imports import import_redis

import_redis()

from engine.serving.command_line import main

gc.freeze()
gc.enable()

if __name__ == "__main__":
    sys.exit(main())
