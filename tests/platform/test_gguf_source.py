"""`load_model` takes a GGUF file, or a folder that holds one."""

from __future__ import annotations

from pathlib import Path

import pytest

from catalog.actions import check_source
from engine.contract.errors import InvalidRequest


def test_a_gguf_file_is_a_source(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    with pytest.raises(InvalidRequest, match="There is no folder"):
        check_source(str(file))
    with pytest.raises(InvalidRequest, match="is not a model folder"):
        check_source(str(tmp_path))
    file.write_bytes(b"GGUF")
    assert check_source(str(file)) == str(file)
    assert check_source(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize("source", ["demo model", "owner/demo model", "demo\tmodel"])
def test_a_source_with_spaces_is_refused_where_it_is_typed(source: str) -> None:
    with pytest.raises(InvalidRequest, match="hub ids have no spaces") as error:
        check_source(source)
    assert error.value.param == "source"
