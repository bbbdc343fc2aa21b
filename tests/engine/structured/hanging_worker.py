"""A compile worker that takes one grammar in its stride and hangs, or dies, at others."""

from __future__ import annotations

import json
import os
import sys
import time

from engine.system.worker_process import read_frame, write_frame


def main() -> None:
    """Answer like the real one; a regex "hang" never returns, "die" ends the process."""
    read_frame(sys.stdin.buffer)
    write_frame(sys.stdout.buffer, b'{"ready": true}')
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        source = json.loads(frame)["source"]
        if source.startswith("hang"):
            time.sleep(600)
        if source.startswith("die"):
            os.abort()
        answer = {"grammar": f"start: /{source}/", "bytes": 1000}
        write_frame(sys.stdout.buffer, json.dumps(answer).encode())


if __name__ == "__main__":
    main()
