"""Real servers: a gateway process, Redis, a database and a fake replica beside it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.database import once_a_run, with_tables
from tests.inference.tokenizer_folder import write_tokenizer
from tests.services import running_redis
from tests.waiting import free_port

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 90.0
#: What a data dir with rows has beside its database.
KEYS = "keys.json"

#: Runs in a process with the instance's own settings.
_MAKE_ROWS = """
import django, json
django.setup()
from catalog.models import DesiredState, ServedModel
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
tenant = actions.create_tenant(actor=SYSTEM_ACTOR, name="Live")
ServedModel.objects.create(
    name="m", source="m", desired_state=DesiredState.LOADED, managed=False
)
key = actions.create_key(actor=SYSTEM_ACTOR, tenant=tenant, name="free").secret
limited = actions.create_key(
    actor=SYSTEM_ACTOR, tenant=tenant, name="limited", requests_per_minute=1
)
print(json.dumps({"key": key, "limited": limited.secret}))
"""

#: `config.serve`, on a socket of its own making.
SERVE = """
import json, socket, sys
from config import serve
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=2048)
options = {"server": "uvicorn", "grace": int(sys.argv[2])}
serve.main([json.dumps(options), str(listener.detach())])
"""


@dataclass
class Instance:
    """What the servers of one installation share.

    Attributes:
        key, limited: API keys, without a limit and with one request a minute.
    """

    folder: Path
    redis_url: str
    environment: dict[str, str]
    key: str
    limited: str
    model_folder: Path


def server_command(server: str, port: int, grace: int = 10) -> list[str]:
    """The command line of one gateway process; `grace`: seconds that uvicorn's requests get."""
    app, python = "config.asgi:application", [sys.executable, "-m"]
    if server == "uvicorn":  # as the product starts it
        return [sys.executable, "-c", SERVE, str(port), str(grace)]
    if server == "granian":
        quiet = ["--interface", "asgi", "--log-level", "warning"]
        return [*python, "granian", app, "--host", "127.0.0.1", "--port", str(port), *quiet]
    return [*python, "daphne", "-b", "127.0.0.1", "-p", str(port), "-v", "0", app]


@contextlib.contextmanager
def process(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives as long as the block."""
    child = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(60)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@contextlib.contextmanager
def instance(folder: Path, redis_url: str | None = None) -> Iterator[Instance]:
    """Redis, a migrated database, a tenant with keys and the model "m" in the catalogue.

    `redis_url`: a server that is there already.
    """
    redis_context = contextlib.nullcontext(redis_url)
    with redis_context if redis_url else running_redis(folder / "redis") as url:
        assert url is not None
        environment = os.environ | {
            "QUIRE_DATA_DIR": str(folder / "data"),
            "DJANGO_SETTINGS_MODULE": "config.settings",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'platform'}",
            "REDIS_URL": url,
        }
        environment.pop("DATABASE_URL", None)
        with once_a_run(__file__, partial(_make_rows, environment)) as rows_folder:
            shutil.copytree(rows_folder, folder / "data")
        keys = json.loads((folder / "data" / KEYS).read_text())
        model = write_tokenizer(folder / "model")
        yield Instance(folder, url, environment, keys["key"], keys["limited"], model)


def _make_rows(environment: dict[str, str], data_dir: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", _MAKE_ROWS],
        env=environment | {"QUIRE_DATA_DIR": str(with_tables(data_dir))},
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    (data_dir / KEYS).write_text(process.stdout.splitlines()[-1])


@contextlib.contextmanager
def replica(of: Instance, module: str, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """A fake replica process of the model "m"."""
    command = [sys.executable, "-m", module, "--redis-url", of.redis_url, "--model-name", "m"]
    command += ["--model-path", str(of.model_folder), *flags]
    with process(command, of.environment) as child:
        yield child


@contextlib.contextmanager
def gateway(
    of: Instance, server: str, workers: int = 1, grace: int = 10
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A gateway process; yields its port when `/health` is green.

    `workers`: that many of them, below the process that is yielded.
    """
    port = free_port()
    command = server_command(server, port, grace)
    if workers > 1:
        command = [sys.executable, "manage.py", "gateway", "--port", str(port)]
        command += ["--workers", str(workers)]
    with process(command, of.environment) as child:
        wait_until_healthy(port)
        yield port, child


def wait_until_healthy(port: int) -> None:
    """Until `/health` is green. Raises the last error after `START_TIMEOUT_S`."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)
