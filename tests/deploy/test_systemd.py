"""The units: systemd takes them, and they start what there is."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.variables import DECLARED_VARIABLES, ROOT, named_in
from tests.docs.commands import problems_with

UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
PYTHON = "/opt/quire/.venv/bin/python"


def service(path: Path) -> dict[str, str]:
    """The [Service] section; of a key that is given twice the last."""
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text())
    return dict(parser["Service"])


@pytest.mark.system
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_finds_nothing_to_say_about_a_unit(path: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is missing")
    unit = tmp_path / path.name
    unit.write_text(path.read_text().replace(PYTHON, sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True
    )
    about_it = [line for line in done.stderr.splitlines() if path.stem in line]
    assert about_it == []


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_starts_commands_that_are_there(path: Path) -> None:
    lines = re.findall(r"^Exec\w+=(.*)$", path.read_text(), re.M)
    assert lines
    for line in lines:
        program, _, command = line.partition(" manage.py ")
        assert program == PYTHON
        assert problems_with(command) == []


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_lets_its_command_end_the_processes_that_it_started(path: Path) -> None:
    assert service(path)["KillMode"] == "mixed"


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_writes_only_where_its_user_may(path: Path) -> None:
    unit = service(path)
    assert unit["User"] == "quire"
    assert (unit["StateDirectory"], unit["CacheDirectory"]) == ("quire", "quire")
    text = path.read_text()
    assert "QUIRE_DATA_DIR=/var/lib/quire" in text
    assert "QUIRE_CACHE_DIR=/var/cache/quire" in text
    assert named_in(text) <= DECLARED_VARIABLES


def test_streams_get_their_time_when_a_unit_stops() -> None:
    for path in UNITS:
        if "worker" not in path.name:  # which gives its work back instead
            assert int(service(path)["TimeoutStopSec"]) > 30 + 10, path.name


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_that_fails_while_a_service_is_away_is_started_until_it_is_back(path: Path) -> None:
    """After five starts in ten seconds systemd would give up for good."""
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text())
    assert parser["Unit"]["StartLimitIntervalSec"] == "0"
    assert service(path)["Restart"] == "always"
