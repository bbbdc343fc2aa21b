"""Streams stay whole while the chart's gateways and replicas are replaced, or started for them."""

from __future__ import annotations

import json
import random
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.helm import HELM
from tests.deploy.pods import Pod
from tests.deploy.test_helm import objects, pods
from tests.deploy.variables import ROOT
from tests.services import running_postgresql, running_redis

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not HELM.exists(), reason="helm is missing: make install-test"),
]

#: Names and model of `sum(name{model_name="model"})` or `sum({__name__=~"names",...})`.
QUERY = re.compile(r'sum\((?:\{__name__=~")?([^"{]+)[^=]*model_name="([^"]+)"\}\)')
HOST = "llm.example.org"
VALUES = {
    "hosts": [HOST],
    "gateway": {"workers": 1},
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
    "model": "demo",
    "prompt": "Once upon a time",
    "max_tokens": 200,
    "min_tokens": 200,
    "temperature": 0,
    "stream": True,
}


class Cluster:
    """Two pods of the gateways and two of the model's replicas."""

    def __init__(self, folder: Path, secret: dict[str, str]) -> None:
        self.folder, self.secret = folder, secret
        self.specs = pods(VALUES)
        (scaled,) = (one for one in objects(VALUES) if one["kind"] == "ScaledObject")
        queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
        self.queries = [query for text in queries for query in QUERY.findall(text)]
        assert len(self.queries) == len(queries) == 2
        self.count = 0
        self.pods: list[Pod] = []
        self.gateways: list[Pod] = []
        self.replicas: list[Pod] = []

    def start(self, workload: str, name: str) -> Pod:
        pod = Pod(name, self.specs[workload], self.folder, self.secret)
        self.pods.append(pod)
        pod.await_ready()
        return pod

    def start_gateway(self) -> Pod:
        self.count += 1
        return self.start("quire-gateway", f"gateway-{self.count}")

    def start_replica(self, number: int) -> Pod:
        return self.start("quire-model-demo", f"quire-model-demo-{number}")

    def roll_gateways(self) -> None:
        """maxSurge 1, maxUnavailable 0."""
        for old in list(self.gateways):
            self.gateways.append(self.start_gateway())
            self.gateways.remove(old)  # the endpoints controller, as soon as the pod shall end
            old.end()

    def roll_replicas(self) -> None:
        """A StatefulSet's, from the last one to the first, under the same names."""
        for number in reversed(range(len(self.replicas))):
            self.replicas[number].end()
            self.replicas[number] = self.start_replica(number)

    def get(self, path: str) -> httpx.Response:
        port = self.gateways[0].ports["http"]
        headers = {"Host": HOST, "X-Forwarded-Proto": "https"}
        headers["Authorization"] = f"Bearer {self.secret['QUIRE_METRICS_TOKEN']}"
        return httpx.get(f"http://127.0.0.1:{port}{path}", headers=headers, timeout=30)

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

    def ask(self) -> str:
        """A whole stream's text by one of the Service's gateways. Raises for all that breaks it."""
        port = random.choice(self.gateways).ports["http"]
        headers = {"Host": HOST, "X-Forwarded-Proto": "https"}
        headers["Authorization"] = f"Bearer {self.secret['KEY']}"
        text, ended = "", False
        url = f"http://127.0.0.1:{port}/v1/completions"
        with httpx.stream("POST", url, json=QUESTION, headers=headers, timeout=90) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {answer.read().decode()}")
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    ended = True
                elif line.startswith("data: "):
                    event: dict[str, Any] = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise RuntimeError(line)
                    text += event["choices"][0]["text"] if event["choices"] else ""
        if not ended:
            raise RuntimeError("the stream has no end")
        return text


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, short_tmp: Path) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with running_postgresql() as database, running_redis(short_tmp / "rolling") as redis:
        secret = {
            "DATABASE_URL": database,
            "REDIS_URL": redis,
            "QUIRE_METRICS_TOKEN": "4d8f" * 8,
            "QUIRE_SECRET_KEY": "k3Jq" * 16 + "Zx81-_",
        }
        made = Cluster(folder, secret)
        run_as_job(made, "migrate --noinput")
        run_as_job(made, "create_tenant Acme")
        secret["KEY"] = run_as_job(made, "create_key --tenant acme --plain")
        try:
            made.gateways = [made.start_gateway(), made.start_gateway()]
            made.replicas = [made.start_replica(number) for number in range(2)]
            yield made
        finally:
            for pod in made.pods:
                pod.kill()


def run_as_job(cluster: Cluster, words: str) -> str:
    """A command as the migration's Job runs its own: the same variables, nothing else."""
    (container,) = cluster.specs["quire-migrate"]["containers"]
    assert container["args"][:2] == ["python", "manage.py"]
    environment = Pod.environment(cluster.specs["quire-migrate"], cluster.folder, "migrate")
    done = subprocess.run(
        [sys.executable, "manage.py", *shlex.split(words)],
        cwd=ROOT,
        env=environment | cluster.secret,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@pytest.mark.parametrize("roll", [Cluster.roll_gateways, Cluster.roll_replicas])
def test_no_stream_breaks_while_all_pods_are_replaced(
    cluster: Cluster, roll: Callable[[Cluster], None]
) -> None:
    expected = cluster.ask()
    over = threading.Event()
    texts: list[str] = []
    failures: list[str] = []

    def trickle() -> None:
        while not over.is_set():
            try:
                texts.append(cluster.ask())
            except (RuntimeError, httpx.HTTPError) as error:
                failures.append(f"{type(error).__name__}: {error}")
            time.sleep(random.uniform(0, 0.2))

    clients = [threading.Thread(target=trickle) for _ in range(4)]
    for client in clients:
        client.start()
    try:
        roll(cluster)
    finally:
        over.set()
        for client in clients:
            client.join(120)
    assert failures == []
    assert len(texts) >= 8
    assert set(texts) == {expected}


@pytest.mark.parametrize("turns", [1, pytest.param(100, marks=pytest.mark.slow)])
def test_a_model_without_a_replica_gets_one_when_a_request_waits(
    cluster: Cluster, turns: int
) -> None:
    expected = cluster.ask()
    with ThreadPoolExecutor() as clients:
        for _ in range(turns):
            await_that(lambda: not cluster.wants_a_replica())
            while cluster.replicas:
                cluster.replicas.pop().end()
            assert cluster.get("/health").status_code == 200
            assert not cluster.wants_a_replica()
            texts = [clients.submit(cluster.ask) for _ in range(3)]
            await_that(cluster.wants_a_replica)
            cluster.replicas.append(cluster.start_replica(0))
            assert [text.result(120) for text in texts] == [expected] * 3


def await_that(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)
