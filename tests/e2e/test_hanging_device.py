"""A device package that hangs: the operator reads where, and other models go on."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.e2e.product import ROOT, running
from tests.packages import DEVICE, install
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
#: Variations of the example that sleep while they load, and in a step.
HANGING = """
import time
from quire_toy import ToyDevice

class LoadingDevice(ToyDevice):
    name = "loading"
    def num_blocks(self, need):
        time.sleep(3600)

class SleepingRunner:
    def __init__(self, runner):
        self.runner = runner
        self.prepare, self.launch, self.reset = runner.prepare, runner.launch, runner.reset
    def execute(self, plan):
        if any(new.sampling.seed == 66613 for new in plan.new):
            time.sleep(3600)
        return self.runner.execute(plan)

class StepDevice(ToyDevice):
    name = "step"
    def make_runner(self, parts):
        return SleepingRunner(super().make_runner(parts))
"""


@pytest.mark.parametrize(
    ("device", "sentence"),
    [
        ("loading", "The device loading has been in num_blocks for"),
        ("step", "The device step has been in Runner.execute for"),
    ],
)
def test_a_hanging_package_is_named_and_other_models_answer(
    tmp_path: Path, device: str, sentence: str
) -> None:
    points = {"loading": "quire_hanging:LoadingDevice", "step": "quire_hanging:StepDevice"}
    installed = install(DEVICE, tmp_path / "installed", **{"quire.devices": points})
    (installed / "quire_hanging.py").write_text(HANGING)
    path = os.pathsep.join([str(installed), str(ROOT), str(ROOT / "platform")])
    with (
        pytest.MonkeyPatch.context() as patch,
        running(tmp_path, "--no-worker", PYTHONPATH=path) as product,
    ):
        patch.setenv("PYTHONPATH", path)
        source = str(ROOT / "demo" / "model")
        product.manage("load_model", source, "--name", "hung", "--device", device)

        def listed() -> str:
            """What an operator reads, with the hints on standard error."""
            done = subprocess.run(
                [sys.executable, "manage.py", "list_models"],
                cwd=ROOT,
                env={**os.environ, "QUIRE_DATA_DIR": str(product.data_dir)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=True,
            )
            return done.stdout

        with httpx.Client(
            base_url=product.base_url,
            headers={"Authorization": f"Bearer {product.api_key}"},
            timeout=60,
        ) as client:

            def ask(model: str, **fields: object) -> str:
                body = {"model": model, "prompt": "The capital of France is", "max_tokens": 4}
                response = client.post("/completions", json=body | fields)
                return str(response.raise_for_status().json()["choices"][0]["text"])

            if device == "step":
                wait_until(lambda: listed().count("1 ready") == 2, timeout_s=240)
                assert "Paris" in ask("hung")

            def is_named() -> bool:
                # Again and again: a client that leaves before its step begins aborts the request.
                if device == "step":
                    body = {"model": "hung", "prompt": "x", "seed": 66613}
                    with suppress(httpx.TimeoutException):
                        client.post("/completions", json=body, timeout=3)
                return sentence in listed()

            wait_until(is_named, timeout_s=240)
            assert "Paris" in ask(product.model)
