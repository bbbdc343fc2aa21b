"""Client libraries, unmodified, against the running product."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.demo.pictures import red_circle
from tests.e2e.product import ROOT, Product
from tests.engine.pooling.minilm import minilm_folder
from tests.services import missing

PROGRAMS = ROOT / "tests" / "clients"
#: Where `make test` installs the Python libraries.
PYTHON = Path(
    os.environ.get("QUIRE_CLIENTS_PYTHON") or Path(sys.prefix) / "clients" / "bin" / "python"
)
AGENTS_PYTHON = Path(
    os.environ.get("QUIRE_AGENTS_PYTHON") or Path(sys.prefix) / "agents" / "bin" / "python"
)
MORE_PYTHON = Path(
    os.environ.get("QUIRE_MORE_CLIENTS_PYTHON")
    or Path(sys.prefix) / "more-clients" / "bin" / "python"
)
PROXY_PYTHON = Path(
    os.environ.get("QUIRE_PROXY_PYTHON") or Path(sys.prefix) / "proxy" / "bin" / "python"
)
NODE_MODULES = PROGRAMS / "node" / "node_modules"


def run(product: Product, *command: str, timeout: float = 120, **more: str) -> dict[str, Any]:
    """What a program prints. `more`: further facts."""
    facts = {
        "BASE_URL": product.base_url,
        "API_KEY": product.api_key,
        "MODEL": product.model,
    } | more
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
    done = subprocess.run(
        command,
        cwd=PROGRAMS / "node",
        env=os.environ | facts | quiet,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def python(product: Product, program: str, python: Path = PYTHON) -> dict[str, Any]:
    if not python.exists():
        missing(f"The client libraries aren't in {python} (make test installs them)")
    return run(product, str(python), str(PROGRAMS / program))


def node(product: Product, program: str) -> dict[str, Any]:
    if shutil.which("node") is None or not NODE_MODULES.is_dir():
        missing("node or its libraries aren't there (make test installs them)")
    return run(product, "node", str(PROGRAMS / "node" / program))


@pytest.mark.slow  # to import it takes 15 s; it asks by the openai SDK
def test_litellm(product: Product) -> None:
    process = python(product, "litellm_client.py")
    assert "Paris" in process["whole"]
    assert process["streamed"] == process["whole"]
    assert process["tokens"] > 0


@pytest.mark.slow  # to import it takes 10 s; it asks by the openai SDK, as instructor does
def test_langchain(product: Product) -> None:
    process = python(product, "langchain_client.py")
    assert "Paris" in process["whole"]
    assert process["streamed"] == process["whole"]
    assert process["calls"] == [["get_weather", ["city"]]]
    assert process["structured"] == ["capital", "country"]


@pytest.mark.slow
def test_instructor(product: Product) -> None:
    process = python(product, "instructor_client.py")
    # While it grows every field may be missing: another schema, so perhaps another answer.
    for person in (process["whole"], process["streamed"]):
        assert person["name"] in ("Anna", "Ben")
        assert isinstance(person["adult"], bool)


@pytest.mark.slow
def test_pydantic_ai(product: Product) -> None:
    process = python(product, "pydantic_ai_client.py", AGENTS_PYTHON)
    assert "Paris" in process["chat"]
    assert process["responses"] == process["messages"] == process["streamed"] == process["chat"]
    assert process["structured"] == ["capital", "country"]


def test_openais_agents_sdk(product: Product) -> None:
    process = python(product, "openai_agents_client.py", AGENTS_PYTHON)
    assert "Paris" in process["responses"]
    kinds = ("responses", "responses_streamed", "chat", "chat_streamed")
    assert {process[kind] for kind in kinds} == {process["chat"]}
    assert process["calls"] >= 2


@pytest.mark.slow
def test_llama_index(product: Product) -> None:
    process = python(product, "llama_index_client.py", MORE_PYTHON)
    assert "Paris" in process["whole"]
    assert process["streamed"] == process["completed"] == process["whole"]
    assert process["calls"] == ["get_weather"]
    assert process["structured"] == ["capital", "country"]


@pytest.mark.slow
@pytest.mark.timeout(900)  # the proxy imports much before it answers
def test_litellms_proxy_in_front(product: Product) -> None:
    if not PROXY_PYTHON.exists():
        missing(f"LiteLLM's proxy isn't in {PROXY_PYTHON} (make test-slow installs it)")
    folder = str(minilm_folder())
    product.manage("load_model", folder, "--name", "behind", "--wait", timeout=300)
    program = str(PROGRAMS / "litellm_proxy_client.py")
    answers = run(product, str(PROXY_PYTHON), program, timeout=400, EMBEDDER="behind")
    product.manage("unload_model", "behind", "--wait")
    assert answers["models"] == ["guide", "plain", "vectors"]
    for name in ("guide", "plain"):
        assert "Paris" in answers[name]
        assert answers[f"{name}_streamed"] == answers[name]
        assert answers[f"{name}_tokens"][0] > 0
    assert answers["calls"] == [["get_weather", ["city"]]]
    assert answers["vectors"] == [384, 384]
    assert "temperature must be in [0, 100]" in answers["refused"]


def test_openai_for_node(product: Product) -> None:
    process = node(product, "openai.mjs")
    assert "Paris" in process["whole"]
    assert process["streamed"] == process["helped"] == process["response"] == process["whole"]
    assert (process["first"], process["last"]) == ("response.created", "response.completed")
    assert process["previous"] is True
    assert (process["content"], process["gone"]) == ("{}\n", "NotFoundError")


def test_vercels_ai_sdk(product: Product) -> None:
    process = node(product, "vercel.mjs")
    assert "Paris" in process["whole"]
    assert process["streamed"] == process["response"] == process["message"] == process["whole"]
    assert process["structured"] == ["capital", "country"]
    assert process["calls"] == ["weather"]
    assert process["tokens"] > 0


@pytest.mark.slow
def test_langchain_and_vercels_ai_sdk_show_a_picture(product: Product) -> None:
    if not PYTHON.exists() or not NODE_MODULES.is_dir():
        missing("The client libraries aren't there (make test installs them)")
    name, file = "sees", io.BytesIO()
    red_circle().save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    facts = {"MODEL": name, "PICTURE": url}
    product.manage("load_model", str(ROOT / "demo/vision/model"), "--name", name, "--wait")
    langchain = run(product, str(PYTHON), str(PROGRAMS / "langchain_picture_client.py"), **facts)
    vercel = run(product, "node", str(PROGRAMS / "node" / "vercel_picture.mjs"), **facts)
    product.manage("unload_model", name, "--wait")
    answers = {*langchain.values(), *vercel.values()}
    assert answers == {"This is a red circle."}
