"""What idle WebSockets and a reader of a byte a second cost a gateway, and its other streams.

python -m tests.inference.bench.sockets [--sockets 1000] [--seconds 10]

One stream gets a token every 5 ms from a replica without a model. Shown are its longest gap and the
gateway's memory: alone; beside the sockets of a page's playground, open and silent; and beside
these and a stream of 8,000 tokens whose client reads a byte a second. Before and after that each
socket is asked for a sign of life.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import websockets

from tests.inference import live
from tests.inference.bench import ROOT
from tests.inference.bench.gaps import COMPLETIONS, PACE_MS, Listener, head

#: Prints the session cookie of somebody who may use the playground.
_SESSION = """
import django
django.setup()
from importlib import import_module
from django.conf import settings
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tenants.models import Role, Tenant, User
user = User.objects.create(username="ada")
tenant = Tenant.objects.get(name="Live")
actions.add_member(actor=SYSTEM_ACTOR, tenant=tenant, user=user, role=Role.MEMBER)
store = import_module(settings.SESSION_ENGINE).SessionStore()
store[SESSION_KEY] = str(user.pk)
store[BACKEND_SESSION_KEY] = "django.contrib.auth.backends.ModelBackend"
store[HASH_SESSION_KEY] = user.get_session_auth_hash()
store.create()
print(f"{settings.SESSION_COOKIE_NAME}={store.session_key}")
"""


def session(of: live.Instance) -> str:
    """A session cookie as name=value."""
    process = subprocess.run(
        [sys.executable, "-c", _SESSION],
        env=of.environment,
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return process.stdout.split()[-1]


def resident_mib(pid: int) -> float:
    """Of a process's memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / (1 << 20)


def slow_reader(port: int, key: str) -> socket.socket:
    """A stream whose client has begun to read, and hardly goes on."""
    body = json.dumps({"model": "m", "stream": True, "prompt": "hi", "max_tokens": 8000})
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", port))
    sock.sendall(head(COMPLETIONS, key, len(body)) + body.encode())
    return sock


async def measure_gateway(
    what: str, port: int, key: str, pid: int, args: argparse.Namespace
) -> None:
    """One line: a stream's longest gaps, a second each, and the gateway's memory."""
    gaps = []
    listener = Listener(port, key)
    await asyncio.sleep(0.5)
    for _ in range(args.seconds):
        began = time.perf_counter()
        await asyncio.sleep(1)
        gaps.append(listener.longest(began, time.perf_counter()))
    await asyncio.to_thread(listener.close)
    row: dict[str, Any] = {"beside": what, "gateway_mib": round(resident_mib(pid))}
    row |= {"gap_ms_median": round(statistics.median(gaps)), "gap_ms_most": round(max(gaps))}
    print(json.dumps(row), flush=True)


async def answer(pages: list[websockets.ClientConnection]) -> None:
    """One line: how many sockets answer."""
    answered = 0
    for page in pages:
        await page.send(json.dumps({"type": "ping"}))
        answered += json.loads(await asyncio.wait_for(page.recv(), 30)) == {"type": "pong"}
    print(json.dumps({"sockets": len(pages), "answered": answered}), flush=True)


async def measure(port: int, key: str, cookie: str, pid: int, args: argparse.Namespace) -> None:
    """All of it."""
    await measure_gateway("nothing", port, key, pid, args)
    address, headers = (
        f"ws://127.0.0.1:{port}/ws/playground/",
        {"Cookie": cookie},
    )
    origin = websockets.Origin(f"http://127.0.0.1:{port}")
    pages = [
        await websockets.connect(
            address, additional_headers=headers, origin=origin, ping_interval=None, open_timeout=60
        )
        for _ in range(args.sockets)
    ]
    await answer(pages)
    await measure_gateway(f"{args.sockets} idle sockets", port, key, pid, args)
    slow = slow_reader(port, key)

    async def trickle() -> None:
        while True:
            await asyncio.to_thread(slow.recv, 1)
            await asyncio.sleep(1)

    task = asyncio.create_task(trickle())
    await measure_gateway("these and a byte a second", port, key, pid, args)
    task.cancel()
    slow.close()
    await answer(pages)
    await asyncio.gather(*(page.close() for page in pages))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sockets", type=int, default=1000)
    parser.add_argument("--seconds", type=int, default=10)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="q-", dir="/tmp") as folder,
        live.instance(Path(folder)) as of,
        live.replica(of, "tests.inference.bench.instant_replica", "--pace-ms", str(PACE_MS)),
        live.gateway(of, "uvicorn") as (port, process),
    ):
        asyncio.run(measure(port, of.key, session(of), process.pid, args))


if __name__ == "__main__":
    main()
