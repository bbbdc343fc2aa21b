"""The plug-ins of docs/extending.md, installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError, InvalidRequest
from engine.contract.plugins import io_processor
from engine.contract.replica_state import EngineStats
from engine.contract.stat_loggers import StatLoggers
from engine.models.registry import ModelRegistry, load_plugins
from engine.offline.llm import LLM
from tests.engine.pooling.models import make
from tests.engine.replica import Gateway, replica
from tests.packages import EXAMPLE, install, project_of

ROOT = Path(__file__).parents[3]
DATA = {"query": "a b", "documents": ["c d e f", "a b", "g h"]}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it is installed."""
    return install(EXAMPLE, tmp_path_factory.mktemp("installed"))


@pytest.fixture
def installed(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is there, in this process and in those that it starts."""
    monkeypatch.syspath_prepend(str(package))
    paths = [str(package), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.delenv("QUIRE_PLUGINS", raising=False)
    io_processor.cache_clear()


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("bert", tmp_path_factory.mktemp("embedder") / "bert")


@pytest.mark.usefixtures("installed")
def test_a_general_plugin_is_called_before_a_model_is_loaded() -> None:
    load_plugins()
    try:
        assert "ExampleForCausalLM" in ModelRegistry.get_supported_archs()
    finally:
        ModelRegistry.unregister_model("ExampleForCausalLM")


@pytest.mark.usefixtures("installed")
def test_in_a_replica_a_logits_processor_has_its_way_and_a_stat_logger_hears_its_figures(
    redis_url: str,
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "stats.jsonl"
    monkeypatch.setenv("EXAMPLE_STATS", str(file))
    prefix = f"plugins{time.time_ns()}"
    with replica(redis_url, prefix, model_folder("llama")):
        gateway = Gateway(redis_url, prefix)
        gateway.await_state("ready")
        gateway.request("plain", [5, 6], max_tokens=8)
        gateway.finish("plain")
        gateway.wait(lambda: any(line["tokens"] == 8 for line in lines(file)))
        gateway.request("r", [5, 6], max_tokens=4, extra_args={"example_only": [9]})
        gateway.finish("r")
        assert gateway.tokens("r") == [9, 9, 9, 9]
        gateway.request("bad", [5, 6], max_tokens=4, extra_args={"example_only": "nine"})
        gateway.wait(lambda: "bad" in gateway.deltas)
        (delta,) = gateway.deltas["bad"]
        assert delta.error is not None
        assert delta.error.message == "example_only must be a list of token ids."
        assert delta.error.param == "extra_args"


def lines(file: Path) -> list[dict[str, Any]]:
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.usefixtures("installed")
def test_an_io_processor_reads_and_answers_data(embedder: Path) -> None:
    llm = LLM(str(embedder), io_processor_plugin="example_nearest", max_model_len=64)
    (result,) = llm.encode({"data": DATA}, use_tqdm=False)
    assert result.outputs["nearest"] == 1
    assert result.outputs["scores"][1] == pytest.approx(1.0, abs=1e-4)
    with pytest.raises(InvalidRequest, match="documents must be"):
        llm.encode({"data": {"query": "x"}}, use_tqdm=False)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("selection", ["", "another"])
def test_what_quire_plugins_leaves_out_isnt_loaded(
    selection: str, monkeypatch: pytest.MonkeyPatch, embedder: Path
) -> None:
    monkeypatch.setenv("QUIRE_PLUGINS", selection)
    load_plugins()
    assert "ExampleForCausalLM" not in ModelRegistry.get_supported_archs()
    monkeypatch.setenv("EXAMPLE_STATS", "/nowhere/at/all")
    StatLoggers(EngineConfig(model="m"), "r").close(EngineStats())
    with pytest.raises(ConfigError, match="There is no IO processor 'example_nearest'"):
        LLM(str(embedder), io_processor_plugin="example_nearest")


@pytest.mark.usefixtures("installed")
def test_a_stat_logger_that_fails_is_told_once_and_harms_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("EXAMPLE_STATS", "/nowhere/at/all")
    loggers = StatLoggers(EngineConfig(model="m"), "r")
    loggers.maybe(EngineStats)
    loggers.close(EngineStats())
    failed = [record for record in caplog.records if "isn't called again" in record.message]
    assert len(failed) == 1


@pytest.mark.usefixtures("installed")
def test_an_io_processor_of_a_model_that_generates_is_refused(
    model_folder: Callable[[str], Path],
) -> None:
    with pytest.raises(ConfigError, match="for pooling models"):
        LLM(str(model_folder("llama")), io_processor_plugin="example_nearest")


def test_an_entry_point_of_the_wrong_kind_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "wrong-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[quire.stat_loggers]\nwrong = json:JSONDecoder\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"wrong .* is no subclass of engine.contract"):
        StatLoggers(EngineConfig(model="m"), "r")


def test_the_page_shows_the_package() -> None:
    page = (ROOT / "docs" / "extending.md").read_text()
    for group, points in project_of(EXAMPLE)["entry-points"].items():
        assert f'"{group}"' in page
        for name, value in points.items():
            assert f'{name} = "{value}"' in page


@pytest.mark.system
def test_plugins_are_found_without_importing_them(package: Path) -> None:
    program = (
        "import engine.contract.plugins as plugins, sys; "
        "plugins.selected_entry_points('quire.stat_loggers'); "
        "assert 'quire_example' not in sys.modules"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(package), str(ROOT)])}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
