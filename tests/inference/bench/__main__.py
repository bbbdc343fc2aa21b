"""What the gateway costs, before a replica that answers at once.

python -m tests.inference.bench [--server uvicorn|granian|daphne] [--concurrency 1,16,64]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from pathlib import Path

from tests.inference import live
from tests.inference.bench.load import Target, run_level


def cpu_seconds(pid: int) -> float:
    """CPU time that a process's event loop (its first thread) has used."""
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int) -> int:
    """Resident memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def measure(args: argparse.Namespace, port: int, pid: int, key: str) -> None:
    """One line of JSON a level."""
    for stream in (True,) if args.streams_only else (False, True):
        for level in map(int, args.concurrency.split(",")):
            body: dict[str, object] = {
                "model": "m",
                "stream": stream,
                "max_tokens": args.tokens,
                "messages": [{"role": "user", "content": "hello there"}],
            }
            target = Target("127.0.0.1", port, key, body)
            pause_s = args.pace_ms * args.tokens / 1000  # about as long as a request takes
            asyncio.run(run_level(target, level, 1.0, pause_s))
            initial_cpu_seconds = cpu_seconds(pid)
            timings = asyncio.run(run_level(target, level, args.seconds, pause_s))
            used = cpu_seconds(pid) - initial_cpu_seconds
            row: dict[str, object] = {"server": args.server, "stream": stream}
            row |= {"workers": args.workers, "concurrency": level}
            row |= timings.summary()
            if args.server == "uvicorn" and args.workers == 1:  # others: not in the first thread
                # What a core of its own would give, on a busy machine too.
                row["loop_cpu_ms_per_request"] = round(1000 * used / len(timings.totals), 3)
                row["tok_per_loop_cpu_s"] = round(timings.tokens / used)
                row["mib"] = memory_mib(pid)
            print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", default="uvicorn")
    parser.add_argument("--workers", type=int, default=1, help="gateway processes")
    parser.add_argument("--concurrency", default="1,16,64")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--pace-ms", type=float, default=0.0, help="between tokens after the first")
    parser.add_argument("--lockstep", action="store_true", help="each token a trip to Redis")
    parser.add_argument("--streams-only", action="store_true")
    args = parser.parse_args()
    flags = ["--pace-ms", str(args.pace_ms), *(["--lockstep"] if args.lockstep else [])]
    with (
        tempfile.TemporaryDirectory(prefix="q-", dir="/tmp") as folder,
        live.instance(Path(folder)) as of,
        live.replica(of, "tests.inference.bench.instant_replica", *flags),
        live.gateway(of, args.server, args.workers) as (port, child),
    ):
        measure(args, port, child.pid, of.key)


if __name__ == "__main__":
    main()
