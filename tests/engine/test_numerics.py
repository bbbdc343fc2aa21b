"""A replica's heartbeat says what decides its tokens' bits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.checkpoints.model_files import model_digest
from engine.contract.engine_config import EngineConfig
from engine.contract.replica_state import Numerics
from engine.core.engine_core import EngineCore
from tests.engine.models import make_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests are kept here; compiled kernels stay where they are."""
    monkeypatch.setattr("engine.checkpoints.model_files.cache_dir", lambda: tmp_path / "cache")


def folder_with(path: Path, weights: bytes, config: str = "{}") -> Path:
    path.mkdir()
    (path / "config.json").write_text(config)
    (path / "model.safetensors").write_bytes(weights)
    return path


def test_a_digest_is_the_contents_and_not_the_folders(tmp_path: Path) -> None:
    one = model_digest(folder_with(tmp_path / "one", b"weights"))
    assert one == model_digest(folder_with(tmp_path / "same", b"weights"))
    assert one != model_digest(folder_with(tmp_path / "two", b"weightz"))
    assert one != model_digest(folder_with(tmp_path / "three", b"weights", '{"a": 1}'))


def test_a_digest_that_is_known_follows_a_change_of_the_file(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "one", b"weights")
    initial_model_digest = model_digest(folder)
    assert model_digest(folder) == initial_model_digest
    state = (folder / "model.safetensors").stat()
    (folder / "model.safetensors").write_bytes(b"weightz")
    os.utime(folder / "model.safetensors", ns=(state.st_atime_ns, state.st_mtime_ns))
    assert model_digest(folder) != initial_model_digest


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_cache_dtype": "bfloat16"},
        {"quantization": "int8"},
        {"cpu_kernels": False},
        {"lora_dtype": "bfloat16"},
    ],
)
def test_equal_replicas_have_equal_numerics_and_others_have_not(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    make_model("llama", tmp_path / "m")

    def of(**more: object) -> Numerics:
        config = EngineConfig(model=str(tmp_path / "m"), cpu_kvcache_space=0.01, **more)
        core = EngineCore(config)
        numerics = core.executor.read_numerics()
        core.shutdown()
        assert numerics is not None
        return numerics

    baseline = of()
    assert len(baseline.fingerprint) == 64
    assert of(num_threads=1).fingerprint == baseline.fingerprint
    changed = of(**changes)
    assert changed.fingerprint != baseline.fingerprint
    assert changed.weights == baseline.weights
