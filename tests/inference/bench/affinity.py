"""What it brings to send a prompt where its beginning is cached, beside replicas chosen at random.

python -m tests.inference.bench.affinity [--replicas 3] [--chats 48] [--rounds 6]

So many chats, each of which begins with 1,000 tokens of its own, are gone on with in turn by 4
clients, over replicas of the demo model that each hold half of the chats. Shown for either way of
choosing: prompt tokens found in caches, and the time to the first token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.inference import live
from tests.inference.bench import ROOT
from tests.inference.bench.two_tenants import Seen, ask, prompt, share
from tests.waiting import free_port

DEMO = ROOT / "demo" / "model"
BEGINNING, QUESTION, ANSWER, CLIENTS, BLOCK = 1000, 30, 8, 4, 16
#: Of a replica, in parts of what all chats take.
CACHED_FRACTION = 0.5
#: A gateway that chooses by lot.
BY_LOT = """
import django
django.setup()
import random
from inference.engine_client import client
def choose_ready(replicas, *_):
    return random.choice([replica for replica in replicas if replica.ready] or [None])
client.choose_replica = choose_ready
"""


def gateway_command(way: str, port: int) -> list[str]:
    """A process that serves, and chooses in this way."""
    python, flag, program, *rest = live.server_command("uvicorn", port)
    return [python, flag, BY_LOT + program if way == "random" else program, *rest]


async def chats(url: str, key: str, args: argparse.Namespace) -> list[Seen]:
    """Go on with each chat once a round; what was seen after the first."""
    of: Any = SimpleNamespace(url=url, model="m")
    rng, seen = random.Random(1), []
    beginnings = [prompt(rng, BEGINNING) for _ in range(args.chats)]
    for turn in range(args.rounds):
        remaining_sample = rng.sample(beginnings, len(beginnings))

        async def client(prefixes: list[str], *, counts: bool) -> None:
            while prefixes:
                response = await ask(of, key, f"{prefixes.pop()} {prompt(rng, QUESTION)}", ANSWER)
                if response.status != 200:
                    raise RuntimeError(f"a chat was answered with {response.status}")
                if counts:
                    seen.append(response)

        await asyncio.gather(*(client(remaining_sample, counts=turn > 0) for _ in range(CLIENTS)))
    return seen


def measure(way: str, args: argparse.Namespace) -> dict[str, Any]:
    """One line."""
    with tempfile.TemporaryDirectory(prefix="q-", dir="/tmp") as folder, ExitStack() as stack:
        of = stack.enter_context(live.instance(Path(folder)))
        blocks = round(CACHED_FRACTION * args.chats * (BEGINNING + QUESTION + ANSWER) / BLOCK)
        for number in range(args.replicas):
            command = [sys.executable, "-m", "engine.serving", "--replica-id", f"r{number}"]
            command += ["--redis-url", of.redis_url, "--model", str(DEMO)]
            command += ["--served-model-name", "m", "--num-gpu-blocks-override", str(blocks)]
            command += ["--block-size", str(BLOCK), "--log-level", "warning"]
            stack.enter_context(live.process(command, of.environment))
        port = free_port()
        stack.enter_context(live.process(gateway_command(way, port), of.environment))
        live.wait_until_healthy(port)
        time.sleep(8)  # the others are ready too
        seen = asyncio.run(chats(f"http://127.0.0.1:{port}", of.key, args))
    tokens = sum(delta.usage["prompt_tokens"] for delta in seen)
    cached = sum(delta.usage["prompt_tokens_details"]["cached_tokens"] for delta in seen)
    first = [timing.first for timing in seen]
    row: dict[str, Any] = {"chosen": way, "requests": len(seen), "cached": cached / tokens}
    return row | {"first_ms_p50": share(first, 0.5), "first_ms_p99": share(first, 0.99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--chats", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    for way in ("affinity", "random"):
        print(json.dumps(measure(way, args)), flush=True)


if __name__ == "__main__":
    main()
