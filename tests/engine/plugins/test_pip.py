"""The example packages are real ones: pip builds and installs them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.packages import DEVICE, EXAMPLE, install


def installed_points(folder: Path) -> tuple[set[tuple[str, str, str]], set[str]]:
    """The entry points of what is installed in a folder, and its modules."""
    (distribution,) = distributions(path=[str(folder)])
    points = {(point.group, point.name, point.value) for point in distribution.entry_points}
    return points, {path.name for path in folder.glob("*.py")}


@pytest.mark.system
@pytest.mark.parametrize("package", [EXAMPLE, DEVICE], ids=["plugins", "device"])
def test_pip_installs_what_the_other_tests_use(package: Path, tmp_path: Path) -> None:
    ways = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    # pip builds beside the source.
    source = shutil.copytree(package, tmp_path / "source")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", *ways, "-t", str(tmp_path / "pip"), source],
        check=True,
    )
    install(package, tmp_path / "linked")
    assert installed_points(tmp_path / "pip") == installed_points(tmp_path / "linked")
