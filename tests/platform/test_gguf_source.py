"""`load_model` takes a GGUF file, or a folder that holds one."""

from __future__ import annotations

from pathlib import Path

import pytest

from catalog.actions import check_source
from catalog.checkpoint import default_name
from engine.contract.errors import InvalidRequest
from tests.hub_cache import cache_files


def test_a_gguf_file_is_a_source(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    with pytest.raises(InvalidRequest, match="There is no folder"):
        check_source(str(file))
    with pytest.raises(InvalidRequest, match="is not a model folder"):
        check_source(str(tmp_path))
    file.write_bytes(b"GGUF")
    assert check_source(str(file)) == str(file)
    assert check_source(str(tmp_path)) == str(tmp_path)


def test_a_gguf_file_in_the_hubs_cache_keeps_its_name(tmp_path: Path) -> None:
    """`hf download` prints the path of a link, whose target is a hash without a suffix."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "tiny-q4.gguf").write_bytes(b"GGUF")
    file = cache_files(tmp_path / "files", tmp_path / "models--a--tiny") / "tiny-q4.gguf"
    assert check_source(str(file)) == str(file)
    assert default_name(str(file)) == "tiny-q4.gguf"
    (tmp_path / "newest.gguf").symlink_to(file)
    assert check_source(str(tmp_path / "newest.gguf")) == str(tmp_path / "newest.gguf")
    (tmp_path / "real.gguf").write_bytes(b"GGUF")
    (tmp_path / "link.gguf").symlink_to("real.gguf")
    assert check_source(str(tmp_path / "link.gguf")) == str(tmp_path / "real.gguf")


@pytest.mark.parametrize("source", ["demo model", "owner/demo model", "demo\tmodel"])
def test_a_source_with_spaces_is_refused_where_it_is_typed(source: str) -> None:
    with pytest.raises(InvalidRequest, match="hub ids have no spaces") as error:
        check_source(source)
    assert error.value.param == "source"
