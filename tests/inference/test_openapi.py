"""The OpenAPI document: complete, as in the repository, and what the gateway really does."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from django.test import AsyncClient

from inference import urls
from inference.openapi import OpenApiView, document, generate
from inference.schemas.field_descriptions import FIELDS, IN_FORMS
from inference.web.views import NotFoundView
from tests.engine.speech.models import JFK
from tests.inference import live
from tests.inference.conftest import HIGH, LOW, Gateway
from tests.inference.forms import upload

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOT = ROOT / "docs" / "openapi.json"


def test_the_snapshot_is_the_document() -> None:
    """After a change of the API: `manage.py openapi -o docs/openapi.json`."""
    stored = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    outputs = generate()
    for part in ("paths", "components"):
        for name in stored[part].keys() | outputs[part].keys():
            assert stored[part].get(name) == outputs[part].get(name), (part, name)
    # In the same order too: gateways serve the stored one, and the reference shows it.
    assert json.dumps(stored) == json.dumps(outputs) == json.dumps(document())


def test_every_endpoint_and_method_is_described() -> None:
    paths = document()["paths"]
    for pattern in urls.urlpatterns:
        view = pattern.callback.cls
        if issubclass(view, (NotFoundView, OpenApiView)):
            continue
        path = "/" + str(pattern.pattern).replace("<str:", "{").replace("<path:", "{")
        methods = {name for name in ("get", "post", "put", "delete") if hasattr(view, name)}
        described = paths[path.replace(">", "}")]
        assert methods <= described.keys(), path
        for method in methods:
            assert described[method]["responses"]["200"].get("content"), (path, method)
            assert described[method]["tags"]


def test_groups_and_operations_say_what_they_are_for() -> None:
    openapi = document()
    groups = [tag["name"] for tag in openapi["tags"]]
    operations = [method for methods in openapi["paths"].values() for method in methods.values()]
    assert groups[0] == "Chat"
    assert {tag for operation in operations for tag in operation["tags"]} == set(groups)
    assert all(operation["summary"] for operation in operations)


def answer_schema(path: str, method: str) -> dict[str, Any]:
    content = document()["paths"][path][method]["responses"]["200"]["content"]
    return {**content["application/json"]["schema"], "components": document()["components"]}


async def test_real_answers_are_as_described(
    gateway: Gateway, settings: Any, tmp_path: Path
) -> None:
    settings.QUIRE = settings.QUIRE.replace(storage_dir=tmp_path)
    client = gateway.client
    message = {"role": "user", "content": "x"}
    asked: list[tuple[str, str, str, Any]] = [
        ("post", "/v1/chat/completions", "", {"messages": [message]}),
        ("post", "/v1/completions", "", {"prompt": "x"}),
        ("post", "/v1/responses", "", {"input": "x"}),
        ("post", "/v1/messages", "", {"messages": [message], "max_tokens": 5}),
        ("post", "/v1/messages/count_tokens", "", {"messages": [message]}),
        ("post", "/tokenize", "", {"prompt": "x"}),
        ("post", "/detokenize", "", {"tokens": [10]}),
        ("get", "/v1/models", "", None),
        ("get", "/v1/models/{model}", "/v1/models/fake", None),
        ("get", "/v1/files", "", None),
        ("get", "/v1/batches", "", None),
        ("get", "/health", "", None),
        ("get", "/ping", "", None),
        ("get", "/version", "", None),
    ]
    async with gateway.serving(gateway.fake(eos_after=5)):
        file_id = (await upload(client, b"{}\n")).json()["id"]
        asked.append(("get", "/v1/files/{file_id}", f"/v1/files/{file_id}", None))
        for method, path, real, body in asked:
            sent = None if body is None else {"model": "fake", **body}
            reply = await client.request(method.upper(), real or path, sent)
            assert reply.status == 200, (path, reply.body)
            jsonschema.validate(reply.json(), answer_schema(path, method))


async def test_it_is_served_without_a_key(gateway: Gateway) -> None:
    gateway.client.key = None
    reply = await gateway.client.get("/openapi.json")
    assert reply.json()["openapi"] == "3.1.0"


async def test_the_reference_page_loads_nothing_from_elsewhere(gateway: Gateway) -> None:
    client = AsyncClient()
    page = await client.get("/reference/")
    text = page.content.decode()
    assert re.findall(r'(?:src|href)="(?!/|#)', text) == []
    assert "unsafe" not in page["Content-Security-Policy"]
    assert "trusted-types 'none'" in page["Content-Security-Policy"]
    matches = set(re.findall(r'data-method="(\w+)" data-path="([^"]+)"', text))
    described = {
        (method, path) for path, one_path in document()["paths"].items() for method in one_path
    }
    assert matches == described
    assert "sk-quire-" not in text.replace("sk-quire-…", "")
    named = set(re.findall(r'href="#(shape-\w+)"', text))
    assert named <= set(re.findall(r'id="(shape-\w+)"', text))


@pytest.fixture(scope="module")
def gateway_url(short_tmp: Path) -> Any:
    """A gateway process with a fake replica; its address and a key with every scope."""
    folder = short_tmp / "openapi"
    folder.mkdir()
    flags = ["--low", str(LOW), "--high", str(HIGH), "--vocab-size", "512", "--eos-after", "5"]
    with (
        live.instance(folder) as of,
        live.replica(of, "tests.fakes.fake_replica", *flags),
        live.gateway(of, "uvicorn") as (port, _),
    ):
        yield f"http://127.0.0.1:{port}", of.key


#: Where this gateway has nothing: nobody's ids, a model that only chats, an operator's path.
UNAVAILABLE = {
    "/v1/batches": 404,
    "/metrics": 403,
    **dict.fromkeys(["/pooling", "/classify", "/v1/classify", "/score", "/v1/score"], 400),
    **dict.fromkeys(["/rerank", "/v1/rerank", "/v2/rerank", "/v1/embeddings"], 400),
    "/v1/moderations": 400,
    **dict.fromkeys(["/v1/audio/transcriptions", "/v1/audio/translations"], 400),
}
#: curl as it is shown, but for telling its status.
SHELL = """curl() { command curl -sS -m 60 -o answer -w '%{http_code} ' "$@"; }
"""


@pytest.mark.system
def test_the_references_examples_run(gateway_url: Any, tmp_path: Path) -> None:
    """As they are, with a key in the environment and a model of this gateway."""
    url, key = gateway_url
    with urllib.request.urlopen(f"{url}/reference/", timeout=60) as page:
        text = page.read().decode()
    matches = re.findall(
        r'data-method="(\w+)" data-path="([^"]+)".*?<figure.*?<code>(.*?)</code>', text, re.DOTALL
    )
    asked = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(asked, timeout=60) as listed:
        model = json.load(listed)["data"][0]["id"]
    shutil.copy(JFK, tmp_path / "speech.wav")
    operators = {"/sleep", "/pause", "/wake_up", "/resume", "/collective_rpc", "/server_info"}
    problems = []
    for method, path, command in matches:
        tags = document()["paths"][path][method]["tags"]
        if "Operator" in tags or path in operators:
            continue  # they change the gateway that is being asked
        script = SHELL + html.unescape(command).replace("MODEL", model)
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "QUIRE_API_KEY": key},
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        expected_status = 404 if "_id}" in path else UNAVAILABLE.get(path, 200)
        if method == "get" and path == "/v1/batches":
            expected_status = 200
        answer = (tmp_path / "answer").read_text(errors="replace")[:300]
        if done.stdout.strip() != str(expected_status) or (
            expected_status == 400 and '"model"' not in answer
        ):
            problems.append((method, path, done.stdout, done.stderr, answer))
    assert len(matches) > 60
    assert problems == [], "\n".join(map(str, problems))


@pytest.mark.system
@pytest.mark.parametrize("examples", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_schemathesis_finds_no_fault_and_nothing_undocumented(
    gateway_url: Any, tmp_path: Path, examples: int
) -> None:
    """Every operation, with made-up requests: no 5xx but those that are documented states."""
    url, key = gateway_url
    checks = "not_a_server_error,status_code_conformance,content_type_conformance"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
            *(
                "--checks",
                checks,
                "--max-examples",
                str(examples),
                "--seed",
                "1",
                "--phases",
                "fuzzing",
            ),
            *("--header", f"Authorization: Bearer {key}", "--request-timeout", "20"),
            # They tell of replicas: 503 is their word for "not now".
            *("--exclude-path-regex", "^/(health|metrics|reset_prefix_cache)$"),
            *("--generation-database", "none", "--no-color"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_every_field_and_parameter_is_described() -> None:
    described = document()
    specs = {
        f"{name}.{field}": spec
        for name, schema in described["components"]["schemas"].items()
        for field, spec in schema.get("properties", {}).items()
    }
    for path, methods in described["paths"].items():
        for operation in methods.values():
            for parameter in operation.get("parameters", ()):
                specs[f"{path}.{parameter['name']}"] = parameter
            for content in operation.get("requestBody", {}).get("content", {}).values():
                for field, spec in content["schema"].get("properties", {}).items():
                    specs[f"{path}.{field}"] = spec
    assert len(specs) > 800
    assert [key for key, spec in specs.items() if not spec.get("description")] == []
    assert FIELDS.keys() - {key.partition(".")[2] for key in specs} == set()
    assert IN_FORMS.keys() - specs.keys() == set()
    # A name whose values have several forms means several things: its schemas describe it.
    for name, text in FIELDS.items():
        forms = [
            value_types(spec)
            for key, spec in specs.items()
            if key.rpartition(".")[2] == name and spec["description"] == text
        ]
        assert set.union(*forms) in forms, name


def value_types(spec: dict[str, Any]) -> set[str]:
    """JSON types of a field's or parameter's values, without null."""
    schema = spec.get("schema", spec)
    options = schema.get("anyOf") or schema.get("oneOf") or [schema]
    types = {"object" if "$ref" in option else option.get("type") for option in options}
    return types - {"null", None}
