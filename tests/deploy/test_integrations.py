"""Files for platforms of others: our commands, flags, variables and paths in them exist."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from django.urls import resolve
from starlette.requests import Request

from tests.deploy.helm import CHART
from tests.deploy.variables import DECLARED_VARIABLES, ROOT
from tests.docs.commands import problems_with
from tests.waiting import free_port

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
        if document.get("kind") == "LLMInferenceService":
            args = document["spec"]["template"]["containers"][0]["args"]
            lines += [f"serve {' '.join(args)}"]
        if document.get("kind") == "ClusterServingRuntime":
            lines += [f"serve {' '.join(document['spec']['containers'][0]['args'])}"]
    assert [problem for line in lines for problem in problems_with(line)] == []
    # For clients the key's name is their own.
    assert set(re.findall(r"\bQUIRE_[A-Z_]+\b", text)) - {"QUIRE_API_KEY"} <= DECLARED_VARIABLES
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


# -- files of Python --------------------------------------------------------------------------


def load(name: str, monkeypatch: pytest.MonkeyPatch, **modules: Any) -> ModuleType:
    """A file, with stand-ins for its platform's modules."""
    for module, stand_in in modules.items():
        monkeypatch.setitem(sys.modules, module, stand_in)
    spec = importlib.util.spec_from_file_location(Path(name).stem, FOLDER / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Deployment:
    """Stands for what `serve.deployment` and `bentoml.service` make of a class."""

    def __init__(self, options: dict[str, Any], inner: Any) -> None:
        self.options, self.inner, self.arguments = options, inner, ()

    def bind(self, *arguments: Any) -> Deployment:
        self.arguments = arguments
        return self


def decorator(**options: Any) -> Callable[[Any], Deployment]:
    return lambda inner: Deployment(options, inner)


def test_bentomls_service_runs_a_server_at_the_port_that_bentoml_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in = SimpleNamespace(service=decorator)
    service = load("bentoml_service.py", monkeypatch, bentoml=stand_in).Quire
    quire, *words = service.inner().__command__()
    assert quire == "quire"
    assert problems_with(shlex.join(words)) == []
    assert words[words.index("--port") + 1] == str(service.options["http"]["proxy_port"])
    for path in service.options["endpoints"].values():
        assert resolve(path)
    assert {entry["name"] for entry in service.options["envs"]} <= DECLARED_VARIABLES


def ray_file(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    serve = SimpleNamespace(deployment=decorator)
    return load(
        "ray_serve.py",
        monkeypatch,
        **{"ray": SimpleNamespace(serve=serve), "ray.serve": serve},
    )


async def pass_on(replica: Any, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    """A request through a replica of Ray's deployment: status and body of its answer."""
    content = json.dumps(body).encode()
    sent = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Any:
        return sent.pop(0) if sent else {"type": "http.disconnect"}

    headers = [(b"host", b"ray"), (b"content-type", b"application/json")]
    headers.append((b"authorization", f"Bearer {KEY}".encode()))
    headers.append((b"content-length", str(len(content)).encode()))
    route, _, query = path.partition("?")
    scope = {"type": "http", "method": "POST", "path": route, "headers": headers}
    scope |= {"query_string": query.encode(), "server": ("ray", 80), "scheme": "http"}
    answer = await replica(Request(scope, receive))
    chunks = [chunk async for chunk in answer.body_iterator]
    await answer.background()
    return answer.status_code, b"".join(chunks)


#: A server for `--port N` that answers as the API does, and says what it was asked.
SERVER = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)))
        if self.headers["Authorization"] != "Bearer " + %r:
            self.send_response(401); self.end_headers(); self.wfile.write(b'{"error": "key"}')
            return
        self.send_response(200); self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for text in ("a ", body["prompt"]):
            choice = {"text": text, "n": body.get("max_tokens")}
            self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\\n\\n")
        if body["prompt"] == "bad":
            self.wfile.write(b'data: {"error": {"message": "no luck"}}\\n\\n')
        self.wfile.write(b"data: [DONE]\\n\\n")
    def log_message(self, *words): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""
KEY = "sk-of-the-integrations-tests"


@pytest.mark.system
async def test_rays_deployment_passes_requests_on_and_notices_a_server_that_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = ray_file(monkeypatch)
    (command,) = file.app.arguments
    assert command[0] == "quire"
    assert problems_with(shlex.join([*command[1:], "--port", "8000"])) == []
    replica = file.app.inner([sys.executable, "-c", SERVER % KEY])
    try:
        await replica.check_health()
        status, body = await pass_on(replica, "/v1/completions?x=1", {"prompt": "tale"})
        assert status == 200
        assert body.startswith(b'data: {"choices": [{"text": "a "')
        assert body.endswith(b"[DONE]\n\n")
        replica._process.kill()
        replica._process.wait()
        with pytest.raises(RuntimeError, match="has ended with status -9"):
            await replica.check_health()
    finally:
        await replica._client.aclose()
        replica.__del__()


async def test_rays_deployment_passes_on_as_many_requests_as_ray_gives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, num_requests = ray_file(monkeypatch), 0
    limit = file.app.options["max_ongoing_requests"]
    all_local = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_requests
        await reader.readuntil(b"\r\n\r\n")
        num_requests += 1
        if num_requests == limit:
            all_local.set()
        await all_local.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=limit)
    replica = file.app.inner([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        host, port = server.sockets[0].getsockname()
        replica._client.base_url, replica._ready = f"http://{host}:{port}", True
        async with asyncio.timeout(120):
            answers = await asyncio.gather(
                *(pass_on(replica, "/v1/completions", {}) for _ in range(limit))
            )
        assert answers == [(200, b"{}")] * limit
    finally:
        server.close()
        await replica._client.aclose()
        replica.__del__()


class Sender:
    """Stands for a request's response sender of Triton."""

    def __init__(self) -> None:
        self.responses: list[Any] = []
        self.final = threading.Event()
        self.cancelled = False

    def is_cancelled(self) -> bool:
        return self.cancelled

    def send(self, response: Any = None, flags: int = 0) -> None:
        assert not self.final.is_set()
        if response is not None:
            self.responses.append(response)
        if flags:
            self.final.set()


def triton_tools() -> SimpleNamespace:
    """Stands for `triton_python_backend_utils`, with its names."""

    def tensor(name: str, value: Any) -> SimpleNamespace:
        return SimpleNamespace(name=name, as_numpy=lambda: value)

    def response(tensors: list[Any], error: Any = None) -> SimpleNamespace:
        return SimpleNamespace(tensors=tensors, error=error)

    return SimpleNamespace(
        Tensor=tensor,
        InferenceResponse=response,
        TritonError=str,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
        get_input_tensor_by_name=lambda request, name: request.inputs.get(name),
    )


def triton_model(monkeypatch: pytest.MonkeyPatch, url: str, model: str = "m") -> Any:
    text = (FOLDER / "triton" / "quire" / "config.pbtxt").read_text()
    matches = re.findall(r'key: "(\w+)" value \{ string_value: "([^"]*)" \}', text)
    parameters = {name: {"string_value": value} for name, value in matches}
    assert parameters.keys() == {"url", "model", "max_requests"}
    parameters |= {"url": {"string_value": url}, "model": {"string_value": model}}
    monkeypatch.setenv("QUIRE_API_KEY", KEY)
    tools = {"triton_python_backend_utils": triton_tools()}
    created = load("triton/quire/1/model.py", monkeypatch, **tools).TritonPythonModel()
    created.initialize({"model_config": json.dumps({"parameters": parameters})})
    return created


def ask_triton(model: Any, text: str, *, stream: bool, **parameters: Any) -> tuple[list[str], Any]:
    """Texts of the responses, and the error of the last one."""
    values = {
        "text_input": np.array([text.encode()], dtype=np.object_),
        "stream": np.array([stream]),
        "sampling_parameters": np.array([json.dumps(parameters).encode()], dtype=np.object_),
    }
    tools = triton_tools()
    inputs = {name: tools.Tensor(name, value) for name, value in values.items()}
    sender = Sender()
    model.execute([SimpleNamespace(inputs=inputs, get_response_sender=lambda: sender)])
    assert sender.final.wait(60)
    texts = [
        tensor.as_numpy()[0].decode() for answer in sender.responses for tensor in answer.tensors
    ]
    return texts, sender.responses[-1].error


@pytest.mark.system
def test_tritons_back_end_answers_whole_in_pieces_and_with_the_servers_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", SERVER % KEY, str(port)])
    try:
        until_listening(port)
        model = triton_model(monkeypatch, f"http://127.0.0.1:{port}/v1")
        assert ask_triton(model, "tale", stream=False) == (["a tale"], None)
        assert ask_triton(model, "tale", stream=True, max_tokens=5) == (["a ", "tale"], None)
        assert ask_triton(model, "bad", stream=True) == (["a ", "bad"], "RuntimeError: no luck")
        model._key = "wrong"
        texts, error = ask_triton(model, "tale", stream=False)
        assert (texts, error) == ([], '401: {"error": "key"}')
        model.finalize()
    finally:
        process.kill()
        process.wait()


def until_listening(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_tritons_configuration_has_the_inputs_that_the_model_reads() -> None:
    config = (FOLDER / "triton" / "quire" / "config.pbtxt").read_text()
    model = (FOLDER / "triton" / "quire" / "1" / "model.py").read_text()
    inputs = re.search(r"^input \[(.*?)^\]", config, re.M | re.S)
    assert inputs is not None
    names = set(re.findall(r'name: "(\w+)"', inputs[1]))
    assert names == set(re.findall(r'_input\(request, "(\w+)"', model))
    assert set(re.findall(r'output \[ \{ name: "(\w+)"', config)) == set(
        re.findall(r'Tensor\("(\w+)"', model)
    )


@pytest.mark.slow
@pytest.mark.system
async def test_ray_and_triton_serve_the_demo_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"QUIRE_API_KEYS": KEY, "QUIRE_DATA_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "manage.py", "serve", "demo/model", "--host", "127.0.0.1"]
    monkeypatch.chdir(ROOT)
    replica = ray_file(monkeypatch).app.inner(command)
    try:
        question = {"model": "model", "prompt": "Once upon a time", "max_tokens": 8}
        status, body = await pass_on(replica, "/v1/completions", {**question, "temperature": 0})
        assert status == 200, body
        text = json.loads(body)["choices"][0]["text"]
        assert text
        model = triton_model(monkeypatch, f"{replica._client.base_url}/v1", "model")
        parameters = {"max_tokens": 8, "temperature": 0}
        ask = partial(ask_triton, model, "Once upon a time", **parameters)
        full, error = await asyncio.to_thread(ask, stream=False)
        assert (full, error) == ([text], None)
        chunks, error = await asyncio.to_thread(ask, stream=True)
        assert ("".join(chunks), error) == (text, None)
        assert len(chunks) > 1
        model.finalize()
    finally:
        await replica._client.aclose()
        replica.__del__()


# -- the page ---------------------------------------------------------------------------------


def rows(heading: str) -> list[list[str]]:
    """Cells of the table below a heading of the page."""
    section = (FOLDER / "README.md").read_text().partition(f"\n## {heading}\n")[2]
    lines = re.findall(r"^\| (.*) \|$", section.partition("\n## ")[0], re.M)
    return [line.split(" | ") for line in lines[1:] if "---" not in line]


def test_the_page_names_every_file() -> None:
    page = (FOLDER / "README.md").read_text()
    for path in FOLDER.iterdir():
        if path.name not in ("README.md", "__pycache__"):
            assert f"`{path.name}" in page, path.name


def test_values_of_production_stack_lead_to_values_and_flags_that_exist() -> None:
    values: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    model = {"name", "source", *values["modelDefaults"]}
    table = rows("production-stack")
    assert len(table) > 20
    for _, ours in table:
        for path in re.findall(r"`([\w.\[\]-]+)`", ours):
            if path.startswith("--"):
                assert problems_with(f"engine x {path}=1") == [], path
            elif path.isupper():
                assert path in DECLARED_VARIABLES | {"HF_TOKEN"}
            elif path.startswith("models[]"):
                first, *rest = path.split(".")[1:]
                assert first in model, path
                inner = values["modelDefaults"].get(first)
                assert all(key in inner for key in rest), path
            else:
                inner = values
                for key in path.split("."):
                    inner = inner[key]


def test_fields_of_an_llm_inference_service_lead_to_flags_that_exist() -> None:
    table = rows("KServe's LLMInferenceService")
    fields = " ".join(theirs for theirs, _ in table)
    (service,) = read("kserve-llm.yaml")
    spec = service["spec"]
    for name in [*(f"model.{key}" for key in spec["model"]), "replicas"]:
        assert f"`{name}`" in fields
    for name in spec["router"]:
        assert f"`router.{name}`" in fields
    for flag in re.findall(r"`(--[\w-]+)", " ".join(ours for _, ours in table)):
        assert problems_with(f"serve x {flag}") == [], flag
    (container,) = spec["template"]["containers"]
    assert container["name"] == "main"
    assert problems_with(shlex.join(["serve", *container["args"]])) == []
    port = container["args"][0].removeprefix("--port=")
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        get = container[probe]["httpGet"]
        assert (str(get["port"]), get["scheme"]) == (port, "HTTP")
        assert resolve(get["path"])


def test_llmds_labels_are_those_of_the_chart() -> None:
    chart = (CHART / "templates" / "models.yaml").read_text()
    ours = set(re.findall(r'"(llm-d\.ai/[\w-]+)"', chart))
    assert {label.strip("`") for label, _ in rows("llm-d")} == ours
