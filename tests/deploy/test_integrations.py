"""Files for platforms of others: our commands, flags, variables and paths in them exist."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from django.urls import resolve

from tests.deploy.variables import KNOWN, ROOT
from tests.docs.commands import problems_with

FOLDER = ROOT / "deploy" / "integrations"
FILES = sorted(FOLDER.glob("*.yaml"))


def read(name: str) -> list[Any]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


@pytest.mark.parametrize("name", [file.name for file in FILES])
def test_what_the_files_name_exists(name: str) -> None:
    text = (FOLDER / name).read_text()
    lines = re.findall(r"python manage\.py (.*)", text)
    # The image's entry point makes `serve` of flags alone.
    for document in read(name):
        if document.get("kind") == "ClusterServingRuntime":
            lines += [f"serve {' '.join(document['spec']['containers'][0]['args'])}"]
    assert [problem for line in lines for problem in problems_with(line)] == []
    # For clients the key's name is their own.
    assert set(re.findall(r"\bQUIRE_[A-Z_]+\b", text)) - {"QUIRE_API_KEY"} <= KNOWN
    for path in re.findall(r"(?:path|url): (/(?:health|v1/\S+))", text):
        assert resolve(path.rstrip("},"))
    assert lines or "https://llm.example.org/v1" in text


def test_an_inference_service_of_kserve_takes_the_runtime_of_the_file() -> None:
    runtime, service = read("kserve.yaml")
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    formats = [entry["name"] for entry in runtime["spec"]["supportedModelFormats"]]
    assert model["modelFormat"]["name"] in formats
    (container,) = runtime["spec"]["containers"]
    port = container["ports"][0]["containerPort"]
    assert f"--port={port}" in container["args"]
    assert container["readinessProbe"]["httpGet"]["port"] == port
