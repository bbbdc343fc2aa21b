"""Where pictures may come from: files of the operator's folder, hosts that are allowed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from common.outbound_http import fetch
from engine.contract.errors import InvalidRequest
from engine.multimodal.inputs import folder_version
from inference.rendering.media import ImageSource, _read


@pytest.fixture
def folder(tmp_path: Path, settings: Any) -> Path:
    """A folder that requests may name files of."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    settings.QUIRE = settings.QUIRE.replace(allowed_local_media_path=folder)
    return folder


def read(url: str) -> bytes:
    """The file of an address."""
    return _read(ImageSource(url, "messages[0].content[0]"))[0]


def test_files_of_the_allowed_folder_are_read(folder: Path) -> None:
    (folder / "a b.png").write_bytes(b"picture")
    assert read(f"file://{folder}/a%20b.png") == b"picture"
    assert read(f"file:{folder}/a%20b.png") == b"picture"
    assert read(f"file://localhost{folder}/a%20b.png") == b"picture"


def test_no_other_file_is_read_and_nobody_learns_whether_it_exists(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "loop").symlink_to(folder / "loop")
    os.mkfifo(folder / "pipe")
    messages = set()
    for url in (
        f"file://{tmp_path}/secret",
        f"file://{tmp_path}/missing",
        f"file://{folder}/../secret",
        f"file://{folder}/%2e%2e/secret",
        f"file://{folder}/link",
        f"file://{folder}/pipe",
        f"file://{folder}",
        f"file://elsewhere{folder}/link",
        f"file://{folder}/a%00b",
        f"file://{folder}/loop",
        f"file://[{folder}/pipe",
    ):
        with pytest.raises(InvalidRequest) as refused:
            read(url)
        assert refused.value.param == "messages[0].content[0]"
        messages.add(refused.value.message)
    assert len(messages) == 1


def test_files_are_refused_unless_the_operator_names_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"picture")
    with pytest.raises(InvalidRequest, match="may not be read"):
        read(f"file://{tmp_path}/a.png")


def test_a_file_over_the_limit_of_bodies_is_refused(folder: Path, settings: Any) -> None:
    settings.QUIRE = settings.QUIRE.replace(max_body_bytes=1000)
    (folder / "large.png").write_bytes(bytes(1001))
    with pytest.raises(InvalidRequest, match="over 1000 bytes"):
        read(f"file://{folder}/large.png")


def test_only_allowed_hosts_are_asked() -> None:
    with pytest.raises(InvalidRequest, match="none of the allowed hosts") as refused:
        fetch(
            "https://b.example/x.png",
            max_bytes=10,
            timeout_s=1.0,
            param="messages[0].content[0]",
            hosts=("a.example",),
        )
    assert refused.value.param == "messages[0].content[0]"


def test_prepared_pictures_follow_a_changed_model_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "preprocessor_config.json").write_text("{}")
    (tmp_path / "dangling.json").symlink_to(tmp_path / "nothing")
    before = folder_version(tmp_path)
    assert folder_version(tmp_path) == before
    replaced = tmp_path / "new"
    replaced.write_text("[]")
    replaced.rename(tmp_path / "preprocessor_config.json")
    assert folder_version(tmp_path) != before
