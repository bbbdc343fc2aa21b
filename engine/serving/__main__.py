"""One replica as a process: `python -m engine.serving --replica-id ID --model FOLDER`."""

# ruff: noqa: E402 - garbage collection is disabled while modules are imported

import gc
import sys

# They are permanent; collecting garbage meanwhile would take a tenth of the import time.
gc.disable()

from engine.system.light_imports import import_redis

import_redis()

from engine.serving.command_line import main

gc.freeze()
gc.enable()

if __name__ == "__main__":
    sys.exit(main())
