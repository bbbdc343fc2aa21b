"""Plug-ins that a package registers in vLLM's groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.contract.plugins import selected_entry_points


def install(folder: Path, name: str, points: str, requires: str = "") -> None:
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    (info / "METADATA").write_text(metadata + (f"Requires-Dist: {requires}\n" if requires else ""))
    (info / "entry_points.txt").write_text(points)


def test_a_package_may_use_the_groups_of_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path, "ported", "[vllm.general_plugins]\nported = json:loads\n", "vllm-flavour>1")
    optional = 'vllm>=0.9; extra == "vllm"'
    install(tmp_path, "optional", "[vllm.general_plugins]\noptional = json:JSONDecoder\n", optional)
    install(tmp_path, "foreign", "[vllm.general_plugins]\nforeign = json:dumps\n", "vllm>=0.9")
    install(
        tmp_path,
        "both",
        "[quire.general_plugins]\nboth = json:load\n[vllm.general_plugins]\nboth = json:dump\n",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    points = {point.name: point.value for point in selected_entry_points("quire.general_plugins")}
    assert points["ported"] == "json:loads"
    assert points["both"] == "json:load"
    assert points["optional"] == "json:JSONDecoder"
    assert "foreign" not in points
    assert "Plug-in foreign (json:dumps) isn't loaded: its package requires vllm" in caplog.text
    assert not {"ported", "both"} & {point.name for point in selected_entry_points("quire.models")}


def test_vllms_plugins_are_selected_by_name_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "ported", "[vllm.stat_logger_plugins]\nported = json:loads\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    monkeypatch.delenv("QUIRE_PLUGINS", raising=False)
    assert not selected_entry_points("quire.stat_loggers")
    monkeypatch.setenv("VLLM_PLUGINS", "ported")
    assert [point.name for point in selected_entry_points("quire.stat_loggers")] == ["ported"]
