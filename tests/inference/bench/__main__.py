"""What the gateway costs, before a replica that answers at once.

python -m tests.inference.bench [--server uvicorn|granian|daphne] [--concurrency 1,16,64]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

from tests.inference.bench.load import Target, run_level
from tests.inference.tokenizer_folder import write_tokenizer

ROOT = Path(__file__).resolve().parents[3]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server_command(server: str, port: int) -> list[str]:
    """The command line of one gateway process."""
    app = "config.asgi:application"
    python = [sys.executable, "-m"]
    if server == "uvicorn":
        quiet = ["--no-access-log", "--log-level", "warning"]
        return [*python, "uvicorn", app, "--host", "127.0.0.1", "--port", str(port), *quiet]
    if server == "granian":
        quiet = ["--interface", "asgi", "--no-ws", "--log-level", "warning"]
        return [*python, "granian", app, "--host", "127.0.0.1", "--port", str(port), *quiet]
    return [*python, "daphne", "-b", "127.0.0.1", "-p", str(port), "-v", "0", app]


def cpu_seconds(pid: int) -> float:
    """CPU time that a process's event loop (its first thread) has used."""
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_until_healthy(port: int) -> None:
    """Until `/health` is green."""
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def make_rows() -> str:
    """Tables, a tenant, a key, the model "m". Returns the key."""
    import django
    from django.core.management import call_command

    django.setup()
    call_command("migrate", verbosity=0)
    from catalog.models import DesiredState, ServedModel
    from tenants import actions
    from tenants.actors import SYSTEM

    tenant = actions.create_tenant(actor=SYSTEM, name="Bench")
    ServedModel.objects.create(
        name="m", source="m", desired_state=DesiredState.LOADED, managed=False
    )
    return actions.create_key(actor=SYSTEM, tenant=tenant, name="bench").secret


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", default="uvicorn")
    parser.add_argument("--concurrency", default="1,16,64")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--profile", default="", help="write the gateway's profile to this file")
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="q-", dir="/tmp")))
        os.environ.update(QUIRE_DATA_DIR=str(folder), DJANGO_SETTINGS_MODULE="config.settings")
        sys.path[:0] = [str(ROOT), str(ROOT / "platform")]
        os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT / 'platform'}"
        from tests.services import running_redis

        url = stack.enter_context(running_redis(folder / "redis"))
        os.environ["REDIS_URL"] = url
        key, model = make_rows(), write_tokenizer(folder / "model")
        port = free_port()
        replica = [sys.executable, "-m", "tests.inference.bench.instant_replica"]
        replica += ["--redis-url", url, "--model-path", str(model), "--step-ms", str(args.step_ms)]
        command = server_command(args.server, port)
        if args.profile:
            command = [sys.executable, "-m", "cProfile", "-o", args.profile, *command[1:]]
        for words in (replica, command):
            process = subprocess.Popen(words, cwd=ROOT)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        wait_until_healthy(port)
        for stream in (False, True):
            for level in map(int, args.concurrency.split(",")):
                body: dict[str, object] = {
                    "model": "m",
                    "stream": stream,
                    "max_tokens": args.tokens,
                    "messages": [{"role": "user", "content": "hello there"}],
                }
                target = Target("127.0.0.1", port, key, body)
                asyncio.run(run_level(target, level, 1.0))
                before = cpu_seconds(process.pid)
                timings = asyncio.run(run_level(target, level, args.seconds))
                used = cpu_seconds(process.pid) - before
                row = {"server": args.server, "stream": stream, "concurrency": level}
                row |= timings.summary()
                # Of the gateway alone: what a core of its own would give, on a busy machine too.
                row["cpu_ms_per_request"] = round(1000 * used / len(timings.whole), 3)
                row["tok_per_cpu_s"] = round(timings.tokens / used)
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
