"""`ModelRegistry.register_model` and plug-ins, with a package that is made for the test."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine import LLM, ModelRegistry
from engine.contract.errors import ConfigError, ModelLoadError
from engine.models import registry as plugins
from engine.transformers_backend.model import TransformersModel
from tests.engine.bridge.conftest import GREEDY, Case, make
from tests.engine.bridge.outside_models import PACKAGE

NAMES = ("ContraryForCausalLM", "MineForCausalLM", "PluggedForCausalLM", "LlamaForCausalLM")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package `outside_pkg` with entry points; what it registers is forgotten."""
    folder = tmp_path / "site"
    (folder / "outside_pkg").mkdir(parents=True)
    (folder / "outside_pkg" / "__init__.py").touch()
    (folder / "outside_pkg" / "model.py").write_text(PACKAGE)
    info = folder / "outside_pkg-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-pkg\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[quire.models]\nContraryForCausalLM = outside_pkg.model:ContraryDecoder\n"
        "[quire.general_plugins]\noutside = outside_pkg.model:plug\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(plugins, "_loaded", set())
    monkeypatch.setenv("QUIRE_PLUGINS", "")
    yield folder
    for name in NAMES:
        ModelRegistry.unregister_model(name)
    for name in [name for name in sys.modules if name.startswith("outside_pkg")]:
        del sys.modules[name]


@pytest.fixture
def llama(case: Callable[[str], Case], tmp_path: Path) -> Callable[[str], Case]:
    """architecture -> the tiny Llama, whose config.json says that it is one."""

    def get(architecture: str) -> Case:
        source = case("llama")
        folder = tmp_path / architecture
        folder.mkdir()
        for file in source.folder.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        config = json.loads((folder / "config.json").read_text())
        config["architectures"] = [architecture]
        (folder / "config.json").write_text(json.dumps(config))
        return Case(folder, source.prompts, source.oracle, oracle_tokens=source.greedy)

    return get


def first_tokens(llm: LLM, expected: Case) -> list[list[int]]:
    outputs = llm.generate(expected.prompts, GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_a_name_is_imported_when_a_checkpoint_asks_for_it(
    package: Path, llama: Callable[[str], Case]
) -> None:
    ModelRegistry.register_model("ContraryForCausalLM", "outside_pkg.model:ContraryDecoder")
    assert "outside_pkg.model" not in sys.modules
    assert "ContraryForCausalLM" in ModelRegistry.get_supported_archs()
    expected = llama("ContraryForCausalLM")
    tokens = first_tokens(make(expected.folder, model_impl="auto"), expected)
    assert "outside_pkg.model" in sys.modules
    assert all(ours != theirs for ours, theirs in zip(tokens, expected.greedy, strict=True))


def test_a_transformers_class_goes_through_the_bridge(
    package: Path, llama: Callable[[str], Case]
) -> None:
    from outside_pkg.model import MineForCausalLM  # type: ignore[import-not-found]

    ModelRegistry.register_model("MineForCausalLM", MineForCausalLM)
    expected = llama("MineForCausalLM")
    llm = make(expected.folder, model_impl="auto")
    assert isinstance(llm.core.executor.worker.loaded.model, TransformersModel)
    assert llm.core.executor.worker.loaded.spec.architecture == "MineForCausalLM"
    assert first_tokens(llm, expected) == expected.greedy


def test_a_known_architecture_is_taken_over_with_a_warning(
    package: Path, case: Callable[[str], Case], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        ModelRegistry.register_model("LlamaForCausalLM", "outside_pkg.model:ContraryDecoder")
    assert "LlamaForCausalLM is known already" in caplog.text
    expected = case("llama")
    assert first_tokens(make(expected.folder, model_impl="auto"), expected) != expected.greedy
    ModelRegistry.unregister_model("LlamaForCausalLM")
    assert first_tokens(make(expected.folder, model_impl="auto"), expected) == expected.greedy


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no_such_package.model:Thing", "can't be imported"),
        ("outside_pkg.model:NoSuchThing", "can't be imported"),
        ("outside_pkg.model:plug", "is no class"),
        ("outside_pkg.model:Incomplete", "lacks make_spec, load, allocate_kv, forward, logits"),
    ],
)
def test_what_breaks_the_contract_is_named_at_load(
    path: str, reason: str, package: Path, llama: Callable[[str], Case]
) -> None:
    ModelRegistry.register_model("MineForCausalLM", path)
    with pytest.raises(ModelLoadError, match=reason):
        make(llama("MineForCausalLM").folder, model_impl="auto")


@pytest.mark.parametrize("model", ["no colon", "a:b:c", 7, None])
def test_what_is_no_model_is_refused_at_once(model: object) -> None:
    with pytest.raises(ConfigError):
        ModelRegistry.register_model("MineForCausalLM", model)  # type: ignore[arg-type]


def test_entry_points_register_models_and_run_plugins_once(
    package: Path, llama: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QUIRE_PLUGINS")
    plugins.load_plugins()
    plugins.load_plugins()
    assert {"ContraryForCausalLM", "PluggedForCausalLM"} <= set(ModelRegistry.get_supported_archs())
    expected = llama("PluggedForCausalLM")
    assert first_tokens(make(expected.folder, model_impl="auto"), expected) == expected.greedy


def test_quire_plugins_names_those_that_are_wanted(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_PLUGINS", "outside")
    plugins.load_plugins()
    architectures = ModelRegistry.get_supported_archs()
    assert "PluggedForCausalLM" in architectures
    assert "ContraryForCausalLM" not in architectures


def test_a_plugin_that_fails_stops_the_engine(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (package / "outside_pkg" / "model.py").write_text("def plug():\n    raise OSError('no disk')\n")
    monkeypatch.setenv("QUIRE_PLUGINS", "outside")
    with pytest.raises(ConfigError, match=r"outside.*no disk"):
        plugins.load_plugins()
