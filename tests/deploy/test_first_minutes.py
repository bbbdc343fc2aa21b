"""The first ten minutes by README's words: a clean environment, its packages, then its commands.

`pytest -s -m slow tests/deploy/test_first_minutes.py` prints the seconds of each step.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.test_wheel import ROOT, environment, run, wheel
from tests.engine.lora.peft_oracle import make_adapter
from tests.engine.models import make_model

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(1500)]
__all__ = ["environment", "wheel"]  # fixtures
README = (ROOT / "README.md").read_text(encoding="utf-8")
#: It compiles kernels.
START_TIMEOUT_S = 900.0
MANAGE = ".venv/bin/python manage.py "


class Newcomer:
    """Somebody at a terminal in `folder`, with README and the programs of `bin`."""

    def __init__(self, bin_folder: Path, folder: Path, env: dict[str, str]) -> None:
        self.bin, self.folder, self.env = bin_folder, folder, env
        self.seconds: dict[str, float] = {}
        self._since = time.monotonic()

    def done(self, step: str) -> None:
        now = time.monotonic()
        self.seconds[step], self._since = now - self._since, now

    def command(self, start: str, **files: Path) -> str:
        """Run the command of README that starts so, with `files` for the paths in it."""
        line = next(line for line in README.splitlines() if line.startswith(MANAGE + start))
        words = shlex.split(line.removeprefix(MANAGE))
        words = [str(files.get(Path(word).name.partition("-")[0], word)) for word in words]
        return run(self.bin / "python", "-m", "quire", *words, cwd=self.folder, env=self.env)

    def ask(self, facts: dict[str, Any], key: str, model: str = "quire-demo") -> str:
        """The answer to README's curl, in which the address, key and model stand."""
        (source,) = re.findall(r"(?ms)^curl http://127.*?\'$", README)
        source = source.replace("http://127.0.0.1:8000", facts["url"]).replace("quire-demo", model)
        done = subprocess.run(
            ["bash", "-c", source.replace("curl ", "curl -fsS ")],
            env=self.env | {"QUIRE_API_KEY": key},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert answer["model"] == model
        assert answer["usage"]["completion_tokens"] > 0
        return str(answer["choices"][0]["message"]["content"])


def test_the_first_ten_minutes(wheel: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    model = make_model("qwen3", tmp_path / "Qwen3", eos_token_id=2)
    adapter = make_adapter(model, tmp_path / "sql")
    # Kernels are compiled here too, as on a new machine.
    del environment["QUIRE_CACHE_DIR"]
    newcomer = Newcomer(tmp_path / "venv" / "bin", tmp_path, environment)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    pip = [str(newcomer.bin / "pip"), "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, str(wheel)], check=True, cwd=tmp_path)
    newcomer.done("install")

    ready, log = tmp_path / "ready.json", tmp_path / "log"
    command = [str(newcomer.bin / "quire"), "up", "--port", "0", "--ready-file", str(ready)]
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready.exists():
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        facts = json.loads(ready.read_text())
        newcomer.done("start")
        assert "Paris" in newcomer.ask(facts, facts["api_key"])
        newcomer.done("first chat")
        newcomer.command("create_tenant research")
        key = newcomer.command("create_key --tenant research").split()[-1]
        newcomer.ask(facts, key)
        newcomer.done("first key")
        newcomer.command("load_model /models/Qwen3-0.6B --name qwen --wait", Qwen3=model)
        newcomer.ask(facts, key, "qwen")
        newcomer.done("first own model")
        newcomer.command("load_adapter", sql=adapter)
        newcomer.ask(facts, key, "sql")
        newcomer.done("first adapter")
    finally:
        server.terminate()
        server.wait(60)
    print()
    for step, seconds in newcomer.seconds.items():
        print(f"{step}: {seconds:.1f} s")
