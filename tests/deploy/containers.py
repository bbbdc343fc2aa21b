"""The compose file's services as processes: each sees a folder of its own and its volumes alone."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from catalog.processes import ManagedProcess, spawn
from tests.deploy.variables import DECLARED_VARIABLES, ROOT
from tests.platform.instance import FAKE, internal

DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
#: What an operator fills the example in with.
FILLED_IN = {
    "QUIRE_SECRET_KEY": "k3Jq" * 16 + "Zx81-_",
    "POSTGRES_PASSWORD": "ink",
    "QUIRE_ALLOWED_HOSTS": "llm.example.org",
}
#: Stands for the bridge's address: whoever connects may take any of the loopback network's.
BRIDGE_ADDRESS = "127.31.76.1"


def example() -> dict[str, str]:
    """`environment.example`, filled in."""
    text = (DEPLOY / "environment.example").read_text()
    return dict(re.findall(r"^([A-Z_]+)=(\S+)$", text, re.M)) | FILLED_IN


def clean() -> dict[str, str]:
    """This process's environment without what is Quire's."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in DECLARED_VARIABLES | {"FORWARDED_ALLOW_IPS"}
    }


def substituted(text: str, values: dict[str, str]) -> str:
    """`${NAME:-default}` and `${NAME:?message}` as compose replaces them."""
    return re.sub(
        r"\$\{(\w+)(?::[-?]([^}]*))?\}", lambda match: values.get(match[1]) or match[2] or "", text
    )


def bridge() -> str:
    """The address from which the published port's connections come."""
    (network,) = COMPOSE["networks"]["default"]["ipam"]["config"]
    return network["gateway"]


class Containers:
    """The services on one database and Redis; nothing else is shared but declared volumes."""

    def __init__(self, folder: Path, database_url: str, redis_url: str, port: int) -> None:
        self.folder, self.port = folder, port
        self.reached = {"DATABASE_URL": database_url, "REDIS_URL": redis_url}
        self.processes: list[ManagedProcess] = []

    def environment(self, service: str) -> dict[str, str]:
        """What the image and the file give a service, in a root folder of its own."""
        root = self.folder / service
        image = (DEPLOY / "Dockerfile").read_text()
        folder_variables = dict(re.findall(r"(QUIRE_\w+|HF_HOME)=(/\S+)", image))
        for volume in COMPOSE["services"][service]["volumes"]:
            source, target = volume.split(":")[:2]
            shared = self.folder / "volumes" / source.replace("/", "_")
            shared.mkdir(parents=True, exist_ok=True)
            inside = root / target.lstrip("/")
            inside.parent.mkdir(parents=True, exist_ok=True)
            if not inside.is_symlink():
                inside.symlink_to(shared)
        environment = COMPOSE["services"][service]["environment"]
        return {
            **clean(),
            **{name: str(root / path.lstrip("/")) for name, path in folder_variables.items()},
            **{name: substituted(str(value), example()) for name, value in environment.items()},
            **self.reached,
            "FORWARDED_ALLOW_IPS": environment["FORWARDED_ALLOW_IPS"].replace(
                bridge(), BRIDGE_ADDRESS
            ),
            **internal(engine_command=FAKE),
            "QUIRE_DRAIN_SECONDS": "1",
            "QUIRE_SHUTDOWN_DELAY_SECONDS": "0",
            "PYTHONPATH": str(ROOT / "platform"),
        }

    def start(self, service: str) -> ManagedProcess:
        """Its command, on loopback and a port of the test's."""
        line = COMPOSE["services"][service]["command"].replace("--host 0.0.0.0", "")
        words = shlex.split(line.replace("--port 8000", f"--port {self.port}"))
        with (self.folder / f"{service}.log").open("ab") as log:
            process = spawn(
                [sys.executable, *words[1:]],
                name=service,
                env=self.environment(service),
                cwd=str(ROOT),
                stdout=log,
                stderr=log,
            )
        self.processes.append(process)
        return process

    def run(self, service: str, *words: str) -> str:
        """`docker compose exec`: a command in a service's container; its output."""
        done = subprocess.run(
            [sys.executable, *words],
            cwd=ROOT,
            env=self.environment(service),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout.strip()

    def stop(self) -> None:
        """All of them."""
        for process in self.processes:
            process.stop(grace=20)
