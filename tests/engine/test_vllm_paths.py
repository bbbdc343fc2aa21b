"""vLLM's module paths lead to the same names here, and the documentation lists them."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import engine
from engine import ModelRegistry
from engine.contract import unavailable
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.entrypoints.launch import exec_quire
from engine.vllm_paths import PATHS

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| `vllm\.([\w.]+)` \| `engine\.([\w.]+)` \| (.*) \|$", re.MULTILINE)
TABLE = {
    path: (module_path, re.findall(r"`(\w+)`", names))
    for path, module_path, names in ROW.findall((ROOT / "docs" / "from-vllm.md").read_text())
}


@pytest.mark.parametrize("path", TABLE)
def test_a_documented_path_has_its_names(path: str) -> None:
    module_path, names = TABLE[path]
    assert module_path == path
    module = importlib.import_module(f"engine.{module_path}")
    assert names
    for name in names:
        value = getattr(module, name)
        if name in engine.__all__ and name not in ("Counter", "Histogram"):
            assert value is getattr(engine, name)


def test_every_path_is_documented() -> None:
    assert set(PATHS) <= set(TABLE)


def test_type_checkers_see_the_names_that_the_engine_loads() -> None:
    tree = ast.parse((ROOT / "engine" / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: node.module for node in imports for alias in node.names}
    assert homes == engine._HOMES
    assert set(engine.__all__) == {*homes, "__version__"}


def test_a_module_of_vllm_has_its_own_names_alone() -> None:
    from engine.v1 import metrics

    assert not hasattr(metrics, "Counter")
    assert (
        importlib.import_module("engine.v1.metrics.reader").__all__
        == PATHS["v1.metrics.reader"].split()
    )
    with pytest.raises(ImportError, match=r"engine\.outputs"):
        exec("from engine.outputs import RequestOutput, Counter")
    with pytest.raises(ModuleNotFoundError, match=r"engine\.v1\.nothing"):
        importlib.import_module("engine.v1.nothing")


def test_configurations_of_vllm_become_settings() -> None:
    from engine.config import AttentionConfig, CompilationConfig, CUDAGraphMode
    from engine.v1.attention.backends.registry import AttentionBackendEnum

    config = EngineConfig.from_mapping(
        {
            "model": "m",
            "attention_config": AttentionConfig(backend=AttentionBackendEnum.TORCH_SDPA),
            "compilation_config": CompilationConfig(
                mode=1, cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY
            ),
        }
    )
    assert config.attention_backend == "TORCH_SDPA"
    assert type(config.attention_backend) is str
    assert (config.optimization_level, config.cudagraph_mode) == (1, "FULL_DECODE_ONLY")


def test_a_class_that_replicas_would_not_see_is_refused() -> None:
    ModelRegistry.register_model("OnlyHereForCausalLM", "somewhere:Class")
    try:
        with pytest.raises(ConfigError, match=r"OnlyHereForCausalLM can't be .*quire\.models"):
            exec_quire(["serve"])
    finally:
        ModelRegistry.unregister_model("OnlyHereForCausalLM")


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("LoggingStatLogger", r"quire\.stat_loggers"),
        ("PrometheusStatLogger", r"quire\.stat_loggers"),
        ("RayPrometheusStatLogger", r"quire\.stat_loggers"),
    ],
)
def test_a_class_of_vllm_without_a_counterpart_names_the_replacement(
    name: str, replacement: str
) -> None:
    kind = getattr(unavailable, name)
    with pytest.raises(ConfigError, match=f"{name} can't be used: .*{replacement}"):
        kind("vllm_config", engine_index=0)
    with pytest.raises(ConfigError, match=f"{name} can't be used: .*{replacement}"):
        type("Mine", (kind,), {})


@pytest.mark.system
@pytest.mark.parametrize(
    "module", ["entrypoints.openai.api_server", "entrypoints.api_server", "entrypoints.cli.main"]
)
def test_programs_of_vllm_become_quire(module: str) -> None:
    words = ["serve", "--help"] if module.endswith("main") else ["--help"]
    done = subprocess.run(
        [sys.executable, "-m", f"engine.{module}", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("usage: quire serve")
    assert "--served-model-name" in done.stdout
