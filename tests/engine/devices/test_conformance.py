"""The conformance kit: the CPU device passes, an example package too, and broken ones are named."""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engine.contract.checkpoint_options import QUANTIZATIONS
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.devices import Device, registry
from engine.devices.conformance.__main__ import main
from engine.devices.conformance.checks import all_checks
from engine.devices.device import CONTRACT_VERSION
from engine.worker.interface import Runner
from tests.engine.devices.__main__ import PAGE, read_table
from tests.packages import DEVICE, install, install_tenstorrent

#: The kit loads a model for each of some seventy checks.
pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).with_name("contract.txt")
#: What the example of docs/extending/device.md doesn't do.
REFUSED = {"adapters", "sleep"}
#: Variations of it that do something wrong, and the check that finds it.
INVALID_PACKAGE = """
from quire_toy import ToyDevice
from kernels.reference import ReferenceKernels

class Inexact(ReferenceKernels):
    def paged_attention(self, args):
        return super().paged_attention(args) * 1.01

class InexactDevice(ToyDevice):
    name = "inexact"
    def make_kernels(self):
        return Inexact()

class RaisingDevice(ToyDevice):
    name = "raising"
    def make_runner(self, parts):
        raise RuntimeError("the card is on fire")

class OldDevice(ToyDevice):
    name = "old"
    contract_version = 0
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the example is installed, with its wrong variations."""
    names = {"inexact": "InexactDevice", "raising": "RaisingDevice", "old": "OldDevice"}
    points = {name: f"quire_wrong:{device}" for name, device in names.items()}
    points |= {"toy": "quire_toy:ToyDevice", "phased": "quire_toy:PhasedDevice"}
    folder = install(DEVICE, tmp_path_factory.mktemp("installed"), **{"quire.devices": points})
    (folder / "quire_wrong.py").write_text(INVALID_PACKAGE)
    return folder


def conformance(device: str, package: Path, *more: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(package), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "engine.devices.conformance", device, "--json", *more],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def rows(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.stdout, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_on_page(device: str, outcomes: list[dict[str, Any]]) -> None:
    assert read_table()[device] == {row["check"]: row["status"] for row in outcomes}, (
        f"write docs/devices.md again: python -m tests.engine.devices {device}"
    )


@pytest.mark.slow
@pytest.mark.system
def test_the_openvino_package_passes_or_refuses(tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="packages/openvino isn't installed")
    done = conformance("openvino", install(DEVICE.with_name("openvino"), tmp_path))
    outcomes = rows(done)
    assert_on_page("openvino", outcomes)
    refused = {row["check"] for row in outcomes if row["status"] == "refused"}
    assert {name for name in refused if not name.startswith("gemma2: ")} == {
        "adapters",
        "KV cache of bfloat16",
    }
    assert done.returncode == 0


@pytest.mark.slow
@pytest.mark.system
def test_the_tenstorrent_package_passes_or_refuses(tmp_path: Path) -> None:
    done = conformance("tt", install_tenstorrent(tmp_path))
    outcomes = rows(done)
    assert_on_page("tt", outcomes)
    assert len(outcomes) >= 60
    refused = {row["check"] for row in outcomes if row["status"] == "refused"}
    assert refused == {"adapters", "n-gram drafts", "sleep"}
    assert done.returncode == 0


@pytest.mark.system
def test_the_tenstorrent_package_runs_as_installed(tmp_path: Path) -> None:
    done = conformance("tt", install_tenstorrent(tmp_path), "--only", "llama: with a cached")
    assert [row["status"] for row in rows(done)] == ["passed"]


@pytest.mark.slow
@pytest.mark.system
def test_the_jax_package_passes_or_refuses(tmp_path: Path) -> None:
    pytest.importorskip("jax", reason="packages/jax-cpu isn't installed")
    done = conformance("jax-cpu", install(DEVICE.with_name("jax-cpu"), tmp_path))
    outcomes = rows(done)
    assert_on_page("jax-cpu", outcomes)
    refused = {row["check"] for row in outcomes if row["status"] == "refused"}
    quiet_models = ("gemma2: ", "gpt2: ", "mixtral: ", "phi: ")
    assert {name for name in refused if not name.startswith(quiet_models)} == {"adapters"}
    assert done.returncode == 0


def test_the_page_names_all_quantization_methods() -> None:
    lines = PAGE.read_text().partition("## Quantization methods")[2].partition("## Results")[0]
    named = [
        method
        for line in lines.splitlines()
        if line.startswith("| `")
        for method in re.findall(r"`([\w-]+)`", line.split("|")[1])
    ]
    assert set(named) == set(QUANTIZATIONS)


@pytest.fixture
def check_device(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, list[dict[str, Any]], str]]:
    """The kit in this process, which has loaded what a program would load first."""

    def check(device: str, only: str) -> tuple[int, list[dict[str, Any]], str]:
        monkeypatch.syspath_prepend(package)
        monkeypatch.setattr(logging.root.manager, "disable", 0)
        status = main([device, "--json", "--only", only])
        printed = capsys.readouterr()
        return status, [json.loads(line) for line in printed.out.splitlines()], printed.err

    return check


def test_the_cpu_device_passes_every_check(check_device: Any) -> None:
    status, outcomes, _ = check_device("cpu", "")
    assert_on_page("cpu", outcomes)
    assert len(outcomes) >= 60
    assert [row for row in outcomes if row["status"] != "passed"] == []
    assert status == 0


@pytest.mark.parametrize("only", ["llama: ", "gemma2: tokens", "mixtral: tokens", *sorted(REFUSED)])
def test_the_example_package_does_what_the_page_says(check_device: Any, only: str) -> None:
    status, outcomes, _ = check_device("toy", only)
    stated = read_table()["toy"]
    assert [row for row in outcomes if row["status"] != stated[row["check"]]] == []
    assert (bool(outcomes), status) == (True, 0)


@pytest.mark.slow
def test_the_example_package_passes_or_refuses(check_device: Any) -> None:
    status, outcomes, _ = check_device("toy", "")
    assert_on_page("toy", outcomes)
    assert [row for row in outcomes if row["status"] == "failed"] == []
    assert {row["check"] for row in outcomes if row["status"] == "refused"} <= REFUSED
    assert status == 0


def test_a_device_with_prompts_or_decodes_and_whole_prompts_passes(check_device: Any) -> None:
    _, outcomes, _ = check_device("phased", "llama:")
    by_check = {row["check"]: row for row in outcomes}
    refused = by_check.pop("llama: with a cached prefix")
    assert (refused["status"], "caches no prefixes" in refused["detail"]) == ("refused", True)
    assert len(by_check) == 5
    assert {row["status"] for row in by_check.values()} == {"passed"}


def test_a_device_whose_attention_is_a_little_wrong_fails(check_device: Any) -> None:
    status, (row,), _ = check_device("inexact", "llama: log probabilities")
    assert (row["status"], status) == ("failed", 1)
    assert "away from transformers'" in row["detail"]


def test_a_device_that_raises_fails_by_its_methods_name(check_device: Any) -> None:
    status, (row,), _ = check_device("raising", "stop tokens")
    assert (row["status"], status) == ("failed", 1)
    assert "the card is on fire (in RaisingDevice.make_runner, quire_wrong.py)" in row["detail"]


def test_a_device_of_another_contract_is_refused_by_name(check_device: Any) -> None:
    status, _, errors = check_device("old", "")
    assert status == 2
    assert "old was written for version 0 of the device contract" in errors


def test_the_tutorial_shows_the_packages_code() -> None:
    page = (ROOT / "docs" / "extending" / "device.md").read_text()
    code = (DEVICE / "quire_toy.py").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    assert [block for block in blocks if block not in code] == []
    (entries,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert entries in (DEVICE / "pyproject.toml").read_text()


def test_a_device_without_a_method_is_refused_by_the_methods_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Unfinished(Device):
        name = "unfinished"

        @classmethod
        def unavailable_reason(cls) -> str:
            return ""

    monkeypatch.setattr(registry, "device_class", lambda name: Unfinished)
    with pytest.raises(ConfigError, match="lacks make_kernels, make_runner, num_blocks") as raised:
        registry.make_device(EngineConfig(model="m", device="cpu"))
    assert raised.value.param == "device"


@cache
def contract() -> str:
    """The signatures that packages are written against."""
    lines = [f"version {CONTRACT_VERSION}"]
    for kind in (Device, Runner):
        for name, value in sorted(vars(kind).items()):
            function = value.__func__ if isinstance(value, classmethod) else value
            if isinstance(value, property):
                lines.append(f"{kind.__name__}.{name}: property")
            elif inspect.isfunction(function) and not name.startswith("_"):
                lines.append(f"{kind.__name__}.{name}{inspect.signature(function)}")
    facts = sorted(name for name in Device.__annotations__ if not name.startswith("_"))
    return "\n".join([*lines, f"facts: {', '.join(facts)}"]) + "\n"


def test_the_contract_changes_with_its_version_alone() -> None:
    assert contract() == GOLDEN.read_text(), (
        "Packages were written against tests/engine/devices/contract.txt. For an addition with a "
        "default write that file again; for a change of what is there, raise CONTRACT_VERSION too."
    )


def test_there_are_sixty_checks_and_names_are_unique() -> None:
    names = [check.name for check in all_checks("cpu")]
    assert len(names) == len(set(names)) >= 60
