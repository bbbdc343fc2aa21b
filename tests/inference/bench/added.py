"""What the gateway adds to the time to the first token: with it and without it, in turns.

python -m tests.inference.bench.added [--streams 64] [--pace-ms 20] [--tokens 64] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path

from tests.inference import live
from tests.inference.bench.load import Target, Timings, percentile, run_level
from tests.inference.bench.raw_client import run_raw_level


def measure(args: argparse.Namespace, of: live.Instance, port: int, replica_id: str) -> None:
    """One line of JSON a round and way, and one of the differences over all rounds."""
    target = Target(
        "127.0.0.1",
        port,
        of.key,
        {
            "model": "m",
            "stream": True,
            "max_tokens": args.tokens,
            "messages": [{"role": "user", "content": "hello there"}],
        },
    )
    pause_s = args.pace_ms * args.tokens / 1000
    firsts: dict[str, list[float]] = {"raw": [], "gateway": []}
    asyncio.run(run_level(target, args.streams, 0.5, pause_s))
    for _ in range(args.rounds):
        for way, timings_of_way in firsts.items():
            timings: Timings
            if way == "raw":
                level = run_raw_level(
                    of.redis_url, replica_id, args.streams, args.seconds, args.tokens, pause_s
                )
            else:
                level = run_level(target, args.streams, args.seconds, pause_s)
            timings = asyncio.run(level)
            timings_of_way += timings.first
            print(json.dumps({"way": way, "streams": args.streams} | timings.summary()), flush=True)
    row = {
        f"added_p{percent}_ms": round(
            percentile(firsts["gateway"], percent) - percentile(firsts["raw"], percent), 2
        )
        for percent in (50, 99)
    }
    print(json.dumps({"way": "added", "streams": args.streams} | row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--pace-ms", type=float, default=20.0, help="between tokens, not the first")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    flags = ("--pace-ms", str(args.pace_ms))
    with (
        tempfile.TemporaryDirectory(prefix="q-", dir="/tmp") as folder,
        live.instance(Path(folder)) as of,
        live.replica(of, "tests.inference.bench.instant_replica", *flags) as replica,
        live.gateway(of, "uvicorn") as (port, _),
    ):
        measure(args, of, port, f"instant-{replica.pid}")


if __name__ == "__main__":
    main()
