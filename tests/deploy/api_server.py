"""A cluster's controllers as far as the chart needs them: its pods are processes of this machine.

`ApiServer.apply` takes what `helm template` renders and does what Kubernetes does with it: hooks
first, then each Deployment and StatefulSet rolls in its own order, all of them at once. Not here:
scheduling, volumes, network policies and images.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.network import Network
from tests.deploy.pods import Pod
from tests.deploy.variables import ROOT

#: Seconds in which proxies still send requests to a pod that has got SIGTERM.
ENDPOINTS_LAG_S = 1.0
HOOK = "helm.sh/hook"


@dataclass
class Workload:
    """A Deployment or StatefulSet, and its pods by their numbers."""

    name: str
    manifest: dict[str, Any]
    tree: Path
    pods: dict[int, Pod] = field(default_factory=dict)
    num_started: int = 0

    @property
    def template(self) -> dict[str, Any]:
        template: dict[str, Any] = self.manifest["spec"]["template"]
        return template


class ApiServer:
    """Runs releases of the chart.

    Attributes:
        secret: what `envFrom` refers to.
        tree: the checkout that pods and Jobs run from here on, in the place of an image.
        network: where pods run.
    """

    def __init__(
        self, folder: Path, secret: dict[str, str], network: Network, tree: Path = ROOT
    ) -> None:
        self.network = network
        self.folder, self.secret, self.tree = folder, secret, tree
        self.workloads: dict[str, Workload] = {}
        self.objects: list[dict[str, Any]] = []
        self._services: dict[str, dict[str, str]] = {}
        self._pods: list[Pod] = []
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(32)

    def apply(self, objects: Iterable[dict[str, Any]], replicas: dict[str, int]) -> None:
        """Install or upgrade a release, and wait until it's rolled out.

        Args:
            replicas: of workloads whose number the chart leaves to an autoscaler.
        """
        self.objects = list(objects)
        hooks = [one for one in self.objects if HOOK in one["metadata"].get("annotations", {})]
        for job in hooks:
            self.run_job(job)
        for one in self.objects:
            if one["kind"] == "Service":
                self._services[one["metadata"]["name"]] = one["spec"]["selector"]
        rolls = []
        for one in self.objects:
            if one["kind"] in ("Deployment", "StatefulSet"):
                name = one["metadata"]["name"]
                count = one["spec"].get("replicas", replicas.get(name, 0))
                rolls.append(self._threads.submit(self._roll_out, name, one, count))
        for roll in rolls:
            roll.result()

    def run_job(self, job: dict[str, Any], *words: str) -> str:
        """Run a Job's command, or `words` of manage.py in its place; return its output."""
        spec = job["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        python, *command = container["args"]
        assert (python, command[0]) == ("python", "manage.py")
        done = subprocess.run(
            [sys.executable, *([command[0], *words] if words else command)],
            cwd=self.tree,
            env=Pod.environment(spec, self.folder, job["metadata"]["name"], self.tree)
            | self.secret,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.strip()

    def manage(self, *words: str) -> str:
        """A command of manage.py in the environment of the release's first Job."""
        return self.run_job(next(one for one in self.objects if one["kind"] == "Job"), *words)

    def endpoints(self, service: str) -> list[Pod]:
        """The pods behind a Service."""
        selector = self._services[service].items()
        with self._lock:
            return [
                pod
                for workload in self.workloads.values()
                if selector <= workload.template["metadata"]["labels"].items()
                for pod in workload.pods.values()
            ]

    def scale(self, name: str, replicas: int) -> None:
        """Set the number of a workload's pods, and wait for it."""
        self._roll_out(name, self.workloads[name].manifest, replicas)

    def stop(self) -> None:
        """At the test's end."""
        self._threads.shutdown(cancel_futures=True)
        for pod in self._pods:
            pod.kill()
            self.network.leave(pod.namespace)

    def _roll_out(self, name: str, manifest: dict[str, Any], replicas: int) -> None:
        with self._lock:
            workload = self.workloads.setdefault(name, Workload(name, manifest, self.tree))
        is_changed = (workload.template, workload.tree) != (manifest["spec"]["template"], self.tree)
        workload.manifest, workload.tree = manifest, self.tree
        numbers = sorted(workload.pods)
        ends = [self._begin_end(workload, number) for number in numbers[replicas:]]
        if is_changed:
            roll = {"Deployment": self._roll_deployment, "StatefulSet": self._roll_stateful_set}
            ends += roll[manifest["kind"]](workload, numbers[:replicas])
        for end in ends:
            end.result()
        is_stateful = manifest["kind"] == "StatefulSet"
        missing = (
            [n for n in range(replicas) if n not in workload.pods]
            if is_stateful
            else [workload.num_started + n for n in range(replicas - len(workload.pods))]
        )
        starts = [self._threads.submit(self._start, workload, number) for number in missing]
        for start in starts:
            start.result()

    def _roll_deployment(self, workload: Workload, numbers: list[int]) -> list[Future[None]]:
        """A new pod first, then an old one ends."""
        strategy = workload.manifest["spec"]["strategy"]["rollingUpdate"]
        assert strategy == {"maxUnavailable": 0, "maxSurge": 1}
        ends = []
        for number in numbers:
            self._start(workload, workload.num_started)
            ends.append(self._begin_end(workload, number))
        return ends

    def _roll_stateful_set(self, workload: Workload, numbers: list[int]) -> list[Future[None]]:
        """From the last pod to the first, one at a time, under the same names."""
        for number in reversed(numbers):
            self._begin_end(workload, number).result()
            self._start(workload, number)
        return []

    def _start(self, workload: Workload, number: int) -> None:
        """Start a pod and wait until it's ready."""
        spec = workload.template["spec"]
        with self._lock:
            workload.num_started += 1
            name = f"{workload.name}-{number}"
            namespace = self.network.join()
            pod = Pod(name, spec, self.folder, self.secret, self.tree, namespace)
            self._pods.append(pod)
        pod.await_ready()
        with self._lock:
            workload.pods[number] = pod

    def _begin_end(self, workload: Workload, number: int) -> Future[None]:
        """End a pod; proxies learn of it a little later, while it ends."""
        pod = workload.pods[number]

        def forget() -> None:
            time.sleep(ENDPOINTS_LAG_S)
            with self._lock:
                del workload.pods[number]

        def end() -> None:
            forgotten = self._threads.submit(forget)
            pod.end()
            forgotten.result()

        return self._threads.submit(end)
