"""The running product, as a person starts it: `manage.py up` in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.database import with_tables

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 180.0
TEXT_DEMO = ("--model", str(ROOT / "demo" / "model"), "--served-model-name", "quire-demo")


@dataclass(slots=True)
class Product:
    """What the ready file says, and how to run commands on the same data."""

    url: str
    api_key: str
    model: str
    admin_url: str
    admin_user: str
    admin_password: str
    data_dir: Path
    process: subprocess.Popen[bytes]

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes."""
        return f"{self.url}/v1"

    def manage(self, *arguments: str, timeout: float = 120.0) -> str:
        """Run a command on this instance's data; returns what it prints."""
        done = subprocess.run(
            [sys.executable, "manage.py", *arguments],
            cwd=ROOT,
            env={**os.environ, "QUIRE_DATA_DIR": str(self.data_dir)},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{arguments}: {done.stdout}{done.stderr}")
        return done.stdout


def clean_environment() -> dict[str, str]:
    """This process's environment without what points to other services."""
    dropped = ("DATABASE_URL", "REDIS_URL", "QUIRE_DATA_DIR", "DJANGO_SETTINGS_MODULE")
    return {name: value for name, value in os.environ.items() if name not in dropped}


@contextmanager
def running(folder: Path, *flags: str, **environment: str) -> Iterator[Product]:
    """`manage.py up` on a free port, from the first token to a clean end by SIGTERM.

    `flags`: without `--model`, the demo model alone is served. `environment`: variables beside
    those of this process.
    """
    if "--model" not in flags:
        flags = (*TEXT_DEMO, *flags)
    with _running(folder, *flags, **environment) as product:
        yield product


@contextmanager
def running_demos(folder: Path, **environment: str) -> Iterator[Product]:
    """The same as a person starts it who names no model: with all demo models."""
    with _running(folder, **environment) as product:
        yield product


@contextmanager
def _running(folder: Path, *flags: str, **environment: str) -> Iterator[Product]:
    data_dir, ready = with_tables(folder / "data"), folder / "ready.json"
    log = (folder / "up.log").open("wb")
    process = subprocess.Popen(
        [
            *(sys.executable, "manage.py", "up", "--port", "0", "--data-dir", str(data_dir)),
            *("--ready-file", str(ready), *flags),
        ],
        cwd=ROOT,
        env=clean_environment() | environment,
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        yield Product(**await_ready(process, ready, folder), data_dir=data_dir, process=process)
        assert process.poll() is None, (folder / "up.log").read_text()[-3000:]
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()
            log.close()


def await_ready(process: subprocess.Popen[bytes], ready: Path, folder: Path) -> dict[str, str]:
    """The ready file's content, once it is there."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if ready.exists():
            if ready.stat().st_mode & 0o077:
                raise RuntimeError("The ready file holds secrets and others may read it.")
            return json.loads(ready.read_text())
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise RuntimeError(f"`up` isn't ready: {(folder / 'up.log').read_text()[-3000:]}")


def product_pids(product: Product, program: str) -> list[int]:
    """Processes of this product in whose command line `program` stands."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().decode(errors="replace")
            environment = (path.parent / "environ").read_bytes().decode(errors="replace")
        except OSError:  # it has ended
            continue
        if program in command and str(product.data_dir) in command + environment:
            pids.append(int(path.parent.name))
    return pids
