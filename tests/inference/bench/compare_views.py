"""Which way of serving costs what: `python -m tests.inference.bench.compare_views`.

CPU time a request, all threads, is what to compare on a busy machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.inference.bench import ROOT
from tests.inference.bench.load import Target, run_level
from tests.inference.live import process
from tests.waiting import free_port

KINDS = ("adrf-middleware", "adrf", "awaited", "lean", "raw")


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    for kind in KINDS:
        port = free_port()
        app = "tests.inference.bench.bare_views:application"
        command = [sys.executable, "-m", "uvicorn", app, "--port", str(port)]
        command += ["--no-access-log", "--log-level", "error", "--lifespan", "off"]
        environment = os.environ | {"KIND": kind, "PYTHONPATH": str(ROOT)}
        with process(command, environment) as child:
            wait(port, child)
            for stream in (False, True):
                body: dict[str, object] = {
                    "model": "m",
                    "stream": stream,
                    "max_tokens": 16,
                    "messages": [{"role": "user", "content": "hello"}],
                }
                target = Target("127.0.0.1", port, "k", body)
                asyncio.run(run_level(target, 16, 0.5))
                initial_cpu_seconds = cpu_seconds(child.pid)
                timings = asyncio.run(run_level(target, 16, 3.0))
                used = cpu_seconds(child.pid) - initial_cpu_seconds
                row = {"kind": kind, "stream": stream, **timings.summary()}
                row["cpu_ms_per_request"] = round(1000 * used / len(timings.totals), 3)
                print(json.dumps(row), flush=True)


def wait(port: int, child: subprocess.Popen[bytes]) -> None:
    """Until the server takes connections."""
    import socket

    for _ in range(200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if child.poll() is not None:
            raise SystemExit("the server did not start")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
