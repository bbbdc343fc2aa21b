"""The compose file and the image: what they name exists, and they agree with the settings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.variables import DECLARED_VARIABLES, named_in
from tests.docs.commands import problems_with

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
#: Names of the compose specification that we use; a misspelt one is ignored without a word.
SERVICE_KEYS = {
    "ulimits",
    "image", "build", "environment", "volumes", "restart", "stop_grace_period", "depends_on",
    "command", "ports", "healthcheck", "hostname",
}  # fmt: skip
CONDITIONS = {"service_started", "service_healthy", "service_completed_successfully"}
OURS = ("migrate", "gateway", "replicas", "worker", "task-worker")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_services_use_names_that_compose_knows(compose: dict[str, Any]) -> None:
    assert set(compose) == {"x-quire", "services", "volumes", "networks"}
    for name, service in compose["services"].items():
        assert set(service) <= SERVICE_KEYS, name
        assert service.get("restart") in ("unless-stopped", "no"), name


def test_what_services_wait_for_can_come(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for name, service in services.items():
        for other, wait in service.get("depends_on", {}).items():
            assert wait["condition"] in CONDITIONS, name
            if wait["condition"] == "service_healthy":
                assert services[other]["healthcheck"]["test"][0] == "CMD", other
            if wait["condition"] == "service_completed_successfully":
                assert services[other]["restart"] == "no", other
    assert services["gateway"]["depends_on"]["migrate"]


def test_volumes_are_declared_and_belong_to_the_images_user(compose: dict[str, Any]) -> None:
    image = (DEPLOY / "Dockerfile").read_text()
    for name, service in compose["services"].items():
        for volume in service.get("volumes", ()):
            source, target = volume.split(":")[:2]
            if source.startswith("."):
                assert not source.startswith("/"), name
                continue
            assert source in compose["volumes"], name
            if name in OURS:  # a new volume takes its owner from the image's folder
                assert re.search(rf"mkdir -p [^&]*{target}", image), target
                assert any(
                    target.startswith(owned)
                    for owned in re.search(r"chown -R quire (.*)", image)[1].split()  # type: ignore[index]
                ), target


@pytest.mark.parametrize("name", OURS)
def test_commands_are_ours_with_their_options(compose: dict[str, Any], name: str) -> None:
    service = compose["services"][name]
    program, _, line = service["command"].partition("manage.py ")
    assert program == "python "
    assert problems_with(line) == []


def test_the_variables_are_settings(compose: dict[str, Any]) -> None:
    environments = set(compose["x-quire"]["environment"])
    assert environments <= DECLARED_VARIABLES | {"FORWARDED_ALLOW_IPS"}
    assert {"DATABASE_URL", "REDIS_URL", "QUIRE_SECRET_KEY", "QUIRE_ALLOWED_HOSTS"} <= environments
    image = (DEPLOY / "Dockerfile").read_text()
    assert named_in(image) <= DECLARED_VARIABLES
    # What compose asks its user for stands in the example.
    asked = set(re.findall(r"\$\{(\w+)", (DEPLOY / "compose.yaml").read_text()))
    assert asked <= set(
        re.findall(r"^#?(\w+)=", (DEPLOY / "environment.example").read_text(), re.M)
    )


def test_streams_get_their_time_when_a_container_stops(compose: dict[str, Any]) -> None:
    settings = compose["x-quire"]
    grace = int(settings["stop_grace_period"].removesuffix("s"))
    assert grace > settings["environment"]["QUIRE_DRAIN_SECONDS"] + 10


def test_the_health_check_is_python_and_asks_the_gateways_own_port(compose: dict[str, Any]) -> None:
    gateway = compose["services"]["gateway"]
    *_, source = gateway["healthcheck"]["test"]
    compile(source, "healthcheck", "exec")
    port = re.search(r"--port (\d+)", gateway["command"])[1]  # type: ignore[index]
    assert f"http://127.0.0.1:{port}/ping" in source
    assert gateway["ports"] == [f"127.0.0.1:{port}:{port}"]


def test_the_image_copies_what_is_there_and_runs_as_nobody_special() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    root = DEPLOY.parent
    stages = {line.split()[3]: line.split()[1] for line in lines if line.startswith("FROM ")}
    for line in lines:
        if line.startswith("COPY --from="):
            assert line.split()[1].removeprefix("--from=") in stages, line
        elif line.startswith("COPY "):
            for source in line.split()[1:-1]:
                assert (root / source).exists(), source
    assert {base for base in stages.values() if base not in stages} == {"python:3.11-slim"}
    head = " ".join(line for line in lines if line.startswith("# "))
    for kind in ("cpu", "gpu", "rocm", "openvino", "tpu", "xpu", "neuron"):
        assert re.search(rf"\b{kind}\b", head), kind
    for target in ("cpu", "openvino", "gpu"):
        start = next(i for i, line in enumerate(lines) if line.endswith(f" AS {target}"))
        rest = lines[start + 1 :]
        end = next((i for i, line in enumerate(rest) if line.startswith("FROM ")), len(rest))
        assert [line for line in rest[:end] if line][-1] == "USER quire", target
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    assert {".git", ".venv", ".quire", "deploy/.env"} <= set(ignored)
    for name in ("manage.py", "platform", "engine", "kernels", "inference", "templates", "demo"):
        assert name not in ignored


def test_flags_alone_make_the_image_serve_one_model_and_words_are_a_command() -> None:
    entrypoint = str(DEPLOY / "entrypoint.sh")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [entrypoint, *words],
            cwd=DEPLOY.parent,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    assert run("python", "manage.py", "version").stdout.startswith("quire")
    refused = run("--model", "demo/model", "--port", "no-number")
    assert "--port" in refused.stderr
    assert refused.returncode != 0
