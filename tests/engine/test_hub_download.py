"""A model from the hub: downloaded with progress, and on from where a cut left it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.checkpoints.model_files import download as fetch_model
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ModelLoadError
from engine.model_loader.loader import resolve_folder
from tests.fakes.hub import Hub

Folder = Callable[[str], Path]
MIB = 1 << 20
#: In a process of its own: the hub's library reads its address when it's imported.
DOWNLOAD = """
import sys
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ModelLoadError
from engine.model_loader.loader import resolve_folder
from engine.contract.replica_state import observe_load_phases
from engine.checkpoints.model_files import download
told = []
try:
    with observe_load_phases(told.append):
        folder = download(EngineConfig(model=sys.argv[1]))
except ModelLoadError as error:
    print("refused:", error.message)
    raise SystemExit(3)
print(folder)
print(told[-1].phase, told[-1].done, told[-1].total)
"""


def download(hub: Hub, cache: Path, name: str = "someone/tiny") -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_DISABLE_XET": "1",
    }
    return subprocess.run(
        [sys.executable, "-c", DOWNLOAD, name],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.system
def test_a_download_that_broke_goes_on_where_it_stopped(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    weights = os.urandom(24 * MIB)
    (folder / "model.safetensors").write_bytes(weights)
    with Hub("someone/tiny", folder, cut_after=15 * MIB, cuts=1) as hub:
        done = download(hub, tmp_path / "cache")
        if done.returncode:  # its library tried no more: the next start of a replica does
            done = download(hub, tmp_path / "cache")
        assert done.returncode == 0, done.stderr[-2000:]
        ranges = [range for _, path, range in hub.asked if path.endswith(".safetensors") and range]
    assert ranges, hub.asked
    assert all(int(range.removeprefix("bytes=").rstrip("-")) >= MIB for range in ranges)
    result, text = done.stdout.splitlines()
    assert (Path(result) / "model.safetensors").read_bytes() == weights
    phase, read, total = text.split()
    assert phase == "downloading"
    assert read == total == str(len(weights) + 2)


@pytest.mark.system
def test_one_that_is_not_there_is_refused_by_its_name(model_folder: Folder, tmp_path: Path) -> None:
    with Hub("someone/tiny", model_folder("llama")) as hub:
        done = download(hub, tmp_path, "someone/else")
    assert done.returncode == 3
    assert "someone/else is no folder here and couldn't be downloaded" in done.stdout


@pytest.mark.system
def test_what_is_in_the_cache_needs_no_hub(model_folder: Folder, tmp_path: Path) -> None:
    with Hub("someone/tiny", model_folder("llama")) as hub:
        assert download(hub, tmp_path).returncode == 0
    assert download(hub, tmp_path).returncode == 0


TOKENIZER = """
import sys
from pathlib import Path
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ModelLoadError
from engine.model_loader.loader import resolve_folder
from engine.text.tokenizer_folder import tokenizer_folder
for question in sys.argv[1:]:
    model, tokenizer, revision = question.split("|")
    config = EngineConfig(
        model=model, tokenizer=tokenizer or None, tokenizer_revision=revision or None
    )
    try:
        print(*sorted(file.name for file in tokenizer_folder(config, Path(model)).iterdir()))
    except ModelLoadError as error:
        print("refused:", error.param, *error.message.split())
"""


@pytest.mark.system
def test_a_tokenizer_comes_from_the_hub_without_the_weights_beside_it(
    model_folder: Folder, tmp_path: Path
) -> None:
    model = model_folder("llama")

    def ask(*questions: str) -> list[str]:
        """Answers to `model|tokenizer|revision`, from one process."""
        done = subprocess.run(
            [sys.executable, "-c", TOKENIZER, *questions],
            env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert not done.returncode, done.stderr[-2000:]
        return done.stdout.splitlines()

    with Hub("someone/tiny", model) as hub:
        (first,) = ask(f"{model}|someone/tiny|")
        pinned, absent, unpinned = ask(
            "someone/tiny||main", f"{model}|someone/else|", f"{model}|{model}|main"
        )
    assert "tokenizer.json" in first.split()
    assert not any(name.endswith(".safetensors") for name in first.split())
    assert "tokenizer.json" in pinned.split()
    assert absent.startswith("refused: tokenizer The tokenizer someon")
    assert "refused: tokenizer_revision" in unpinned


def test_a_path_that_is_no_folder_is_no_id_of_the_hub_either() -> None:
    with pytest.raises(ModelLoadError, match="absent/ is no folder here") as error:
        fetch_model(EngineConfig(model="absent/"))
    assert error.value.param == "model"


@pytest.mark.parametrize("name", ["a" * 300, "~nobody-of-this-name/model"])
def test_what_cannot_be_a_path_is_refused_by_its_field(name: str) -> None:
    with pytest.raises(ModelLoadError, match="is no path") as error:
        resolve_folder(EngineConfig(model=name))
    assert error.value.param == "model"
