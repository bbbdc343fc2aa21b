"""Client libraries, unmodified, against the running product."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
    facts = more | {
        "BASE_URL": product.base_url,
        "API_KEY": product.api_key,
        "MODEL": product.model,
    }
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


def test_litellm(product: Product) -> None:
    said = python(product, "litellm_client.py")
    assert "Paris" in said["whole"]
    assert said["streamed"] == said["whole"]
    assert said["tokens"] > 0


def test_langchain(product: Product) -> None:
    said = python(product, "langchain_client.py")
    assert "Paris" in said["whole"]
    assert said["streamed"] == said["whole"]
    assert said["calls"] == [["get_weather", ["city"]]]
    assert said["structured"] == ["capital", "country"]


def test_instructor(product: Product) -> None:
    said = python(product, "instructor_client.py")
    # While it grows every field may be missing: another schema, so perhaps another answer.
    for person in (said["whole"], said["streamed"]):
        assert person["name"] in ("Anna", "Ben")
        assert isinstance(person["adult"], bool)


def test_pydantic_ai(product: Product) -> None:
    said = python(product, "pydantic_ai_client.py", AGENTS_PYTHON)
    assert "Paris" in said["chat"]
    assert said["responses"] == said["messages"] == said["streamed"] == said["chat"]
    assert said["structured"] == ["capital", "country"]


def test_openais_agents_sdk(product: Product) -> None:
    said = python(product, "openai_agents_client.py", AGENTS_PYTHON)
    assert "Paris" in said["responses"]
    kinds = ("responses", "responses_streamed", "chat", "chat_streamed")
    assert {said[kind] for kind in kinds} == {said["chat"]}
    assert said["calls"] >= 2


@pytest.mark.slow
def test_llama_index(product: Product) -> None:
    said = python(product, "llama_index_client.py", MORE_PYTHON)
    assert "Paris" in said["whole"]
    assert said["streamed"] == said["completed"] == said["whole"]
    assert said["calls"] == ["get_weather"]
    assert said["structured"] == ["capital", "country"]


@pytest.mark.slow
@pytest.mark.timeout(900)  # the proxy imports much before it answers
def test_litellms_proxy_in_front(product: Product) -> None:
    if not PROXY_PYTHON.exists():
        missing(f"LiteLLM's proxy isn't in {PROXY_PYTHON} (make test-slow installs it)")
    folder = str(minilm_folder())
    product.manage("load_model", folder, "--name", "behind", "--wait", timeout=300)
    program = str(PROGRAMS / "litellm_proxy_client.py")
    said = run(product, str(PROXY_PYTHON), program, timeout=400, EMBEDDER="behind")
    product.manage("unload_model", "behind", "--wait")
    assert said["models"] == ["guide", "plain", "vectors"]
    for name in ("guide", "plain"):
        assert "Paris" in said[name]
        assert said[f"{name}_streamed"] == said[name]
        assert said[f"{name}_tokens"][0] > 0
    assert said["calls"] == [["get_weather", ["city"]]]
    assert said["vectors"] == [384, 384]
    assert "temperature must be in [0, 100]" in said["refused"]


def test_openai_for_node(product: Product) -> None:
    said = node(product, "openai.mjs")
    assert "Paris" in said["whole"]
    assert said["streamed"] == said["helped"] == said["response"] == said["whole"]
    assert (said["first"], said["last"]) == ("response.created", "response.completed")
    assert said["previous"] is True
    assert (said["content"], said["gone"]) == ("{}\n", "NotFoundError")


def test_vercels_ai_sdk(product: Product) -> None:
    said = node(product, "vercel.mjs")
    assert "Paris" in said["whole"]
    assert said["streamed"] == said["response"] == said["message"] == said["whole"]
    assert said["structured"] == ["capital", "country"]
    assert said["calls"] == ["weather"]
    assert said["tokens"] > 0
