"""Replicas get files of adapters by a command, once."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from engine.contract.errors import InvalidRequest
from engine.contract.lora import AdapterRef
from engine.lora.fetcher import AdapterFetcher
from tests.adapter_files import adapter_folder

#: Copies the folder "source" beside "cache" into it, and writes down that it was asked.
COMMAND = """
import shutil, sys
from pathlib import Path
root, digest = Path(sys.argv[1]), sys.argv[2]
with (root / "calls").open("a") as calls:
    calls.write(digest + chr(10))
shutil.copytree(root / "source", root / "cache" / digest)
print("a library says something first")
print(root / "cache" / digest)
"""


@pytest.mark.parametrize("path", ["/on/the/gateway", "/dev/null/of/the/gateway"])
def test_an_adapter_is_fetched_once_and_again_when_its_copy_has_gone(
    tmp_path: Path, path: str
) -> None:
    adapter_folder(tmp_path / "source")
    fetcher = AdapterFetcher([sys.executable, "-c", COMMAND, str(tmp_path)])
    ref = AdapterRef(digest="a" * 64, path=path)
    local = fetcher.fetch(ref)
    assert local.path == str(tmp_path / "cache" / ref.digest)
    assert fetcher.fetch(ref) == local
    assert fetcher.fetch(local) == local
    shutil.rmtree(local.path)
    assert fetcher.fetch(ref) == local
    assert (tmp_path / "calls").read_text().split() == [ref.digest] * 2


def test_an_adapter_that_cant_be_fetched_is_refused_by_its_name(tmp_path: Path) -> None:
    fetcher = AdapterFetcher([sys.executable, "-c", COMMAND, str(tmp_path)])
    with pytest.raises(InvalidRequest, match="'tone' can't be fetched right now"):
        fetcher.fetch(AdapterRef(digest="a" * 64, name="tone", path="/on/the/gateway"))


def test_an_adapter_whose_copy_is_trimmed_while_it_is_read_is_fetched_again(tmp_path: Path) -> None:
    adapter_folder(tmp_path / "source")
    fetcher = AdapterFetcher([sys.executable, "-c", COMMAND, str(tmp_path)])
    paths = []

    def read(ref: AdapterRef) -> str:
        paths.append(ref.path)
        if len(paths) == 1:
            shutil.rmtree(ref.path)
            raise FileNotFoundError(ref.path)
        return "facts"

    assert fetcher.load(AdapterRef(digest="a" * 64, path="/on/the/gateway"), read) == "facts"
    assert len(paths) == 2


def test_an_adapter_that_cant_be_read_is_refused_once(tmp_path: Path) -> None:
    adapter_folder(tmp_path / "source")
    fetcher = AdapterFetcher([sys.executable, "-c", COMMAND, str(tmp_path)])
    read = Mock(side_effect=InvalidRequest("It has another shape."))
    with pytest.raises(InvalidRequest, match="another shape"):
        fetcher.load(AdapterRef(digest="a" * 64, path="/on/the/gateway"), read)
    assert read.call_count == 1
