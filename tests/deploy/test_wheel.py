"""The wheel, built and used by somebody who has no checkout: other folder, other environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 240.0
#: Folders of a checkout, and where a wheel has them.
FOLDERS = {
    "engine": "engine",
    "kernels": "kernels",
    "inference": "inference",
    "quire": "quire",
    "platform": "quire/_platform",
    "templates": "quire/templates",
    "benchmarks": "quire/_platform/benchmarks",
    "demo/model": "quire/demo/model",
    "demo/adapters": "quire/demo/adapters",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(ROOT)], check=True, cwd=folder)
    (path,) = folder.glob("quire-*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel; what it depends on comes from the tests' own."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", str(wheel)], check=True, cwd=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Nothing of this process's Quire, and a home of its own."""
    retained_values = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("QUIRE_", "DJANGO_", "PYTHON", "PYTEST"))
        and name not in ("DATABASE_URL", "REDIS_URL")
    }
    compiled = os.environ.get("QUIRE_CACHE_DIR", str(Path.home() / ".cache" / "quire"))
    return retained_values | {"HOME": str(tmp_path), "QUIRE_CACHE_DIR": compiled}


def run(python: Path, *arguments: str, cwd: Path, env: dict[str, str]) -> str:
    done = subprocess.run(
        [str(python), *arguments], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_only_four_names_lie_in_site_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    top = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert top == {"engine", "kernels", "inference", "quire"}
    assert not [name for name in names if "__pycache__" in name]


def test_every_file_that_the_product_reads_is_in_the_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for source, target in FOLDERS.items():
        paths = {
            f"{target}/{path.relative_to(ROOT / source)}"
            for path in (ROOT / source).rglob("*")
            if path.is_file() and path.parent.name != "__pycache__"
        }
        assert paths, source
        assert paths - names == set()
    assert "quire/docs/openapi.json" in names


def test_a_program_uses_the_engine_from_any_folder(
    python: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    code = """
import sys
from pathlib import Path
import engine, platform, quire
from quire import LLM, SamplingParams
assert LLM is engine.LLM
assert not {"config", "common", "storage", "django"} & set(sys.modules)
llm = LLM(str(Path(quire.__file__).parent / "demo" / "model"))
(output,) = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=4))
print(engine.__file__)
print(engine.__version__, len(output.outputs[0].token_ids))
"""
    lines = run(python, "-c", code, cwd=tmp_path, env=environment).splitlines()
    assert Path(lines[-2]).is_relative_to(python.parents[1])
    assert lines[-1].endswith(" 4")


@pytest.fixture
def served(
    python: Path, tmp_path: Path, environment: dict[str, str]
) -> Iterator[tuple[dict[str, Any], subprocess.Popen[bytes]]]:
    """`quire up` in an empty folder."""
    ready, log = tmp_path / "ready.json", tmp_path / "log"
    command = [str(python.with_name("quire")), "up", "--port", "0", "--ready-file", str(ready)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield json.loads(ready.read_text()), process
    finally:
        process.terminate()
        process.wait(60)


def test_the_product_serves_from_any_folder(
    served: tuple[dict[str, Any], subprocess.Popen[bytes]],
    python: Path,
    tmp_path: Path,
    environment: dict[str, str],
) -> None:
    facts, process = served
    with httpx.Client(base_url=facts["url"], timeout=60, trust_env=False) as client:
        headers = {"Authorization": f"Bearer {facts['api_key']}"}
        message = {"role": "user", "content": "Hello!"}
        body = {"model": facts["model"], "messages": [message], "max_tokens": 4}
        answer = client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        page = client.get("/login/")
        assert page.status_code == 200
        style = next(word for word in page.text.split('"') if word.endswith(".css"))
        assert client.get(style).status_code == 200
        assert client.get("/openapi.json").status_code == 200
    # Data lies in the home of whoever runs it, and not between the packages.
    assert (tmp_path / ".quire").is_dir()
    assert not (python.parents[1] / ".quire").exists()
    models = run(python, "-m", "quire", "list_models", cwd=tmp_path, env=environment)
    assert facts["model"] in models
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
