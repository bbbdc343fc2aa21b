"""Seed 003's last step, a server: packages/tt over HTTP, on the stand-in for the hardware."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest

from tests.e2e.product import ROOT, running
from tests.packages import install_tenstorrent
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_model_on_tenstorrent_answers_as_on_a_cpu(tmp_path: Path) -> None:
    installed = install_tenstorrent(tmp_path / "installed")
    path = os.pathsep.join([str(installed), str(ROOT), str(ROOT / "platform")])
    source = str(ROOT / "demo" / "model")
    with (
        pytest.MonkeyPatch.context() as patch,
        running(tmp_path, "--no-worker", PYTHONPATH=path) as product,
    ):
        patch.setenv("PYTHONPATH", path)
        for name, device in (("chip", "tt"), ("host", "cpu")):
            product.manage(
                "load_model", source, "--name", name, "--device", device, "--dtype", "float32"
            )
        with httpx.Client(
            base_url=product.base_url,
            headers={"Authorization": f"Bearer {product.api_key}"},
            timeout=60,
        ) as client:

            def ask(model: str, prompt: str) -> str | None:
                body = {"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0}
                response = client.post("/completions", json=body)
                return response.json()["choices"][0]["text"] if response.is_success else None

            wait_until(lambda: ask("chip", "Hello"), timeout_s=120)
            wait_until(lambda: ask("host", "Hello"), timeout_s=120)
            for length in (1, 20, 60):
                prompt = "The capital of France is " * length
                assert ask("chip", prompt) == ask("host", prompt), length
