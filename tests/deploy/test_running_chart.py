"""Streams stay whole while the chart's gateways and replicas are replaced, or started for them."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from catalog.processes import spawn
from tests.deploy.api_server import ApiServer
from tests.deploy.helm import HELM
from tests.deploy.network import Network, pod_network
from tests.deploy.pods import Pod
from tests.deploy.test_helm import groups, objects
from tests.deploy.variables import ROOT
from tests.object_storage import new_bucket
from tests.services import running_postgresql, running_redis
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not HELM.exists(), reason="helm is missing: make install-test"),
]

#: Names and model of `sum(name{model_name="model"})` or `sum({__name__=~"names",...})`.
QUERY = re.compile(r'sum\((?:\{__name__=~")?([^"{]+)[^=]*model_name="([^"]+)"\}\)')
HOST = "llm.example.org"
GATEWAY, MODEL = "quire-gateway", "quire-model-demo"
WORKERS = ("quire-worker", "quire-task-worker")
VALUES = {
    "hosts": [HOST],
    "gateway": {"workers": 1},
    "worker": {"replicas": 0},
    "taskWorker": {"replicas": 0},
    "models": [
        {
            "name": "demo",
            "source": str(ROOT / "demo" / "model"),
            "args": ["--max-model-len=512", "--num-gpu-blocks-override=256"],
            "autoscaling": {"enabled": True, "minReplicas": 0},
        }
    ],
}
QUESTION = {
    "prompt": "Once upon a time",
    "max_tokens": 200,
    "min_tokens": 200,
    "temperature": 0,
    "stream": True,
}


class Cluster(ApiServer):
    """Two gateways and three replicas, beside PostgreSQL, Redis and S3."""

    def install(self) -> None:
        """The first release."""
        self.style = "json"
        self.apply(objects(VALUES, self.chart), {MODEL: 3})
        (scaled,) = (one for one in self.objects if one["kind"] == "ScaledObject")
        queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
        self.queries = [query for text in queries for query in QUERY.findall(text)]
        assert len(self.queries) == len(queries) == 2

    def upgrade(self) -> None:
        """A release with another setting, which replaces all pods."""
        self.style = {"json": "line", "line": "json"}[self.style]
        settings = {"QUIRE_LOG_STYLE": self.style}
        counts = {name: len(workload.pods) for name, workload in self.workloads.items()}
        values = VALUES | {"settings": settings}
        values |= {"worker": {"replicas": counts[WORKERS[0]]}}
        values |= {"taskWorker": {"replicas": counts[WORKERS[1]]}}
        self.apply(objects(values, self.chart), counts)

    @property
    def chart(self) -> Path:
        """The one of the checkout that is the image."""
        return self.tree / "deploy" / "helm" / "quire"

    @property
    def num_replicas(self) -> int:
        return len(self.workloads[MODEL].pods)

    def get(self, path: str) -> httpx.Response:
        headers = {"Host": HOST, "X-Forwarded-Proto": "https"}
        headers["Authorization"] = f"Bearer {self.secret['QUIRE_METRICS_TOKEN']}"
        url = self.endpoints(GATEWAY)[0].url("http", path)
        return httpx.get(url, headers=headers, timeout=30)

    def wants_a_replica(self) -> bool:
        """Whether one of the model's triggers is active, as KEDA asks Prometheus."""
        figures = list(text_string_to_metric_families(self.get("/metrics").text))
        samples = [sample for family in figures for sample in family.samples]
        return any(
            sample.value > 0
            for names, model in self.queries
            for sample in samples
            if re.fullmatch(names, sample.name) and sample.labels.get("model_name") == model
        )

    @contextmanager
    def _answer(self, client: httpx.Client, body: dict[str, Any]) -> Iterator[httpx.Response]:
        """A stream of one of the Service's gateways.

        Raises httpx.ConnectError for a gateway that refuses connections too early. What comes later
        is this process's own delay, and goes to another one.
        """
        while True:
            gateway = random.choice(self.endpoints(GATEWAY))
            request = client.build_request(
                "POST", gateway.url("http", "/v1/completions"), json=body
            )
            try:
                answer = client.send(request, stream=True)
                break
            except httpx.ConnectError:
                if time.monotonic() < gateway.accepts_until:
                    raise
        try:
            yield answer
        finally:
            answer.close()

    def ask(self, model: str = "demo") -> str:
        """A whole stream's text by one of the Service's gateways. Raises for all that breaks it."""
        headers = {"Host": HOST, "X-Forwarded-Proto": "https"}
        headers["Authorization"] = f"Bearer {self.secret['KEY']}"
        text, finished = "", False
        body = QUESTION | {"model": model}
        with (
            httpx.Client(headers=headers, timeout=90) as client,
            self._answer(client, body) as answer,
        ):
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {answer.read().decode()}")
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    finished = True
                elif line.startswith("data: "):
                    event: dict[str, Any] = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise RuntimeError(line)
                    text += event["choices"][0]["text"] if event["choices"] else ""
        if not finished:
            raise RuntimeError("the stream has no end")
        return text


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, short_tmp: Path) -> Iterator[Cluster]:
    with installed(tmp_path_factory.mktemp("cluster"), short_tmp / "rolling", ROOT) as cluster:
        yield cluster


@contextmanager
def installed(folder: Path, redis_folder: Path, tree: Path) -> Iterator[Cluster]:
    """A release of the chart with a checkout's programs; kernels are built before."""
    build = [sys.executable, "-c", "from kernels.cpu.build import best_library; best_library()"]
    subprocess.run(build, cwd=tree, check=True)
    with (
        running_postgresql() as database,
        running_redis(redis_folder) as redis,
        pod_network() as network,
        s3_server(network) as s3,
    ):
        secret = {
            "DATABASE_URL": database,
            "REDIS_URL": redis,
            "QUIRE_OBJECT_STORAGE": json.dumps(new_bucket(s3)),
            "QUIRE_METRICS_TOKEN": "4d8f" * 8,
            "QUIRE_SECRET_KEY": "k3Jq" * 16 + "Zx81-_",
        }
        cluster = Cluster(folder, secret, network, tree)
        try:
            cluster.install()
            cluster.manage("create_tenant", "Acme")
            secret["KEY"] = cluster.manage("create_key", "--tenant", "acme", "--plain")
            yield cluster
        finally:
            cluster.stop()


@contextmanager
def s3_server(network: Network) -> Iterator[str]:
    """An S3 server beside the pods; gives its address."""
    namespace = network.join()
    port = namespace.port(5000)
    words = ["-m", "moto.server", "-H", namespace.listen_address, "-p", str(port)]
    process = spawn(
        [*namespace.command, sys.executable, *words], name="s3", stderr=subprocess.DEVNULL
    )
    url = f"http://{namespace.address}:{port}"
    try:
        wait_until(lambda: _answers(url))
        yield url
    finally:
        process.stop(grace=5)
        network.leave(namespace)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.slow
def test_no_stream_breaks_while_all_pods_are_replaced(cluster: Cluster) -> None:
    streams = ask_during(cluster, cluster.upgrade)
    assert streams >= 8


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_stream_breaks_in_upgrades_of_all_parts_with_an_adapter_in_object_storage(
    cluster: Cluster,
) -> None:
    for workload in WORKERS:
        cluster.scale(workload, 1)
    adapter = str(ROOT / "demo" / "adapters" / "pirate")
    cluster.manage("load_adapter", adapter, "--model", "demo")
    assert cluster.ask("demo:pirate") != cluster.ask("demo")
    num_streams = sum(ask_during(cluster, cluster.upgrade, "demo:pirate") for _ in range(5))
    print(f"{num_streams} streams in 5 upgrades of all pods, none broken")
    caches = list(cluster.folder.glob(f"{MODEL}-*/var/lib/quire/adapter-cache/*/*.safetensors"))
    # A replica fetches it with its first request for it; the router prefers those that have it.
    assert 1 <= len(caches) <= cluster.num_replicas
    for workload in WORKERS:
        cluster.scale(workload, 0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_stream_breaks_between_two_releases_in_both_directions(
    tmp_path: Path, short_tmp: Path
) -> None:
    """The other release is QUIRE_OTHER_REVISION: one with the same migrations."""
    migrations = ("git", "log", "-1", "--format=%H", "--", "platform/*/migrations/*")
    revision = os.environ.get("QUIRE_OTHER_REVISION") or git(*migrations)
    tree = tmp_path / "other"
    git("git", "worktree", "add", "--detach", str(tree), revision)
    try:
        with installed(tmp_path, short_tmp / "releases", tree) as cluster:
            assert {pod.tree for pod in cluster.endpoints(GATEWAY)} == {tree}
            for release in (ROOT, tree):  # while pods of both run, gateways and replicas mix
                cluster.tree = release
                num_streams = ask_during(cluster, cluster.upgrade)
                print(f"{num_streams} streams while {revision[:8]} was changed to {release.name}")
                assert {pod.tree for pod in cluster.endpoints(GATEWAY)} == {release}
    finally:
        git("git", "worktree", "remove", "--force", str(tree))


@pytest.mark.slow
def test_a_model_on_two_machines_answers_as_on_one(cluster: Cluster) -> None:
    model = {"name": "spread", "source": str(ROOT / "demo" / "model"), "nodes": 2}
    model["args"] = [*VALUES["models"][0]["args"], "--pipeline-parallel-size=2"]
    created = objects(VALUES | {"models": [model]}, cluster.chart)
    positions = [cluster.network.join() for _ in range(2)]
    pods = []
    try:
        for index, (name, template) in enumerate(groups(created).items()):
            variables = {
                "LWS_LEADER_ADDRESS": positions[0].address,
                "LWS_WORKER_INDEX": str(index),
            }
            about = (name.replace(" ", "-"), template["spec"], cluster.folder, cluster.secret)
            pods.append(Pod(*about, ROOT, positions[index], variables))
        pods[0].await_ready()
        assert cluster.ask("spread") == cluster.ask("demo")
    finally:
        for pod in pods:
            pod.kill()
        for position in positions:
            cluster.network.leave(position)


def git(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def ask_during(cluster: Cluster, change: Callable[[], None], model: str = "demo") -> int:
    """Number of streams that ran during a change; none may break or differ."""
    expected = cluster.ask(model)
    exceeding_event = threading.Event()
    texts: list[str] = []
    failures: list[str] = []

    def trickle() -> None:
        while not exceeding_event.is_set():
            try:
                texts.append(cluster.ask(model))
            except (RuntimeError, httpx.HTTPError) as error:
                failures.append(f"{type(error).__name__}: {error}")
            time.sleep(random.uniform(0, 0.2))

    clients = [threading.Thread(target=trickle) for _ in range(4)]
    for client in clients:
        client.start()
    try:
        change()
    finally:
        exceeding_event.set()
        for client in clients:
            client.join(120)
    assert failures == []
    assert set(texts) == {expected}
    return len(texts)


@pytest.mark.parametrize(
    "turns", [1, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(4 * 3600)])]
)
def test_a_model_without_a_replica_gets_one_when_a_request_waits(
    cluster: Cluster, turns: int
) -> None:
    expected = cluster.ask()
    with ThreadPoolExecutor() as clients:
        for _ in range(turns):
            wait_until(lambda: not cluster.wants_a_replica())
            cluster.scale(MODEL, 0)
            assert cluster.get("/health").status_code == 200
            assert not cluster.wants_a_replica()
            texts = [clients.submit(cluster.ask) for _ in range(3)]
            wait_until(cluster.wants_a_replica)
            cluster.scale(MODEL, 1)
            assert [text.result(120) for text in texts] == [expected] * 3
