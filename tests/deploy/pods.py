"""What the Helm chart makes, run here: pods with their commands, variables, probes and ends.

The folder of a pod stands for its root file system; claims are folders that pods share.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from catalog.processes import ManagedProcess, spawn
from kernels.cpu.build import cache_dir
from tests.deploy.containers import clean
from tests.deploy.network import LOOPBACK, NetworkNamespace
from tests.deploy.variables import ROOT

START_S = 120.0
#: Default of QUIRE_SHUTDOWN_DELAY_SECONDS.
SHUTDOWN_DELAY_S = 5.0


class Pod:
    """One pod of a workload: `spec` is its template's, `secret` what `envFrom` refers to.

    `tree`: the checkout that is its image. `place`: its network. `variables`: more that its
    arguments may refer to.

    Attributes:
        ports: by name. accepts_until: when it may refuse connections, by `time.monotonic`.
    """

    def __init__(
        self,
        name: str,
        spec: dict[str, Any],
        folder: Path,
        secret: dict[str, str],
        tree: Path = ROOT,
        namespace: NetworkNamespace = LOOPBACK,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._variables = {"POD_NAME": name, **variables}
        self.namespace, self.accepts_until = namespace, math.inf
        self.name, self.spec, self.folder, self.tree = name, spec, folder, tree
        (self.container,) = spec["containers"]
        self.ports = {
            port["name"]: namespace.port(port["containerPort"])
            for port in self.container.get("ports", [])
        }
        self._process = self._spawn(secret)

    @staticmethod
    def environment(
        spec: dict[str, Any], folder: Path, name: str, tree: Path = ROOT
    ) -> dict[str, str]:
        """A pod's variables, with its folders below `folder/name`, and the folders themselves."""
        root = folder / name
        (container,) = spec["containers"]
        for mount in container["volumeMounts"]:
            inside = root / mount["mountPath"].lstrip("/")
            inside.parent.mkdir(parents=True, exist_ok=True)
            if mount["name"] != "storage":
                inside.mkdir(exist_ok=True)
            elif not inside.exists():
                claim = folder / "storage"
                claim.mkdir(exist_ok=True)
                inside.symlink_to(claim)
        variables = {
            entry["name"]: entry["value"] for entry in container["env"] if "value" in entry
        }
        folders = {
            name: str(root / value.lstrip("/"))
            for name, value in variables.items()
            if value.startswith("/var/")
        }
        for library in cache_dir().glob("kernels-*.so"):  # the image has them built ahead
            inside = Path(folders["QUIRE_CACHE_DIR"]) / library.name
            if not inside.exists():
                inside.symlink_to(library)
        return {
            **clean(),
            **variables,
            **folders,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(tree / "platform"),
        }

    def _spawn(self, secret: dict[str, str]) -> ManagedProcess:
        python, *words = (self._localized(word) for word in self.container["args"])
        assert python == "python"
        with (self.folder / f"{self.name}.log").open("ab") as log:
            return spawn(
                [*self.namespace.command, sys.executable, *words],
                name=self.name,
                env=self.environment(self.spec, self.folder, self.name, self.tree) | secret,
                cwd=str(self.tree),
                stdout=log,
                stderr=log,
            )

    def _localized(self, word: str) -> str:
        """A word of the command, with this pod's name, address and port."""
        declared = self.container.get("ports", [])
        ports = {str(port["containerPort"]): port["name"] for port in declared}
        if word in ports:
            return str(self.ports[ports[word]])
        if word == "0.0.0.0":
            return self.namespace.listen_address
        return re.sub(r"\$\((\w+)\)", lambda name: self._variables[name[1]], word)

    def url(self, port: str, path: str = "") -> str:
        """Where its port of that name is reached."""
        return f"http://{self.namespace.address}:{self.ports[port]}{path}"

    def passes(self, probe: str) -> bool:
        """One look of the kubelet's."""
        declared_probe = self.container[probe]
        get = declared_probe["httpGet"]
        headers = {header["name"]: header["value"] for header in get.get("httpHeaders", [])}
        url = self.url(get["port"], get["path"])
        try:
            answer = httpx.get(url, headers=headers, timeout=declared_probe["timeoutSeconds"])
        except httpx.HTTPError:
            return False
        return 200 <= answer.status_code < 400

    def await_ready(self) -> None:
        """As the kubelet has it: a container without probes is ready once it runs."""
        deadline = time.monotonic() + START_S
        probes = [name for name in ("startupProbe", "readinessProbe") if name in self.container]
        while not all(self.passes(probe) for probe in probes):
            assert self._process.poll() is None, f"{self.name} has ended"
            assert time.monotonic() < deadline, f"{self.name} isn't ready"
            time.sleep(0.2)

    def end(self) -> None:
        """As a pod ends: preStop, SIGTERM, and SIGKILL when its time is over."""
        hook = self.container.get("lifecycle", {}).get("preStop")
        if hook is not None:
            time.sleep(hook["sleep"]["seconds"])
        self.accepts_until = time.monotonic() + SHUTDOWN_DELAY_S
        self._process.stop(grace=self.spec["terminationGracePeriodSeconds"])

    def kill(self) -> None:
        """At the test's end."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(60)
