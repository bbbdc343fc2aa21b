"""The example packages of docs/extending.md, as pip installs them, without running pip."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parent / "engine" / "plugins" / "package"
DEVICE = Path(__file__).parents[1] / "packages" / "toy"

TENSTORRENT = DEVICE.with_name("tt")
#: In place of ttnn, with models.
FAKE_TTNN = Path(__file__).parent / "engine" / "devices" / "tt" / "fake_ttnn.py"


def install_tenstorrent(target: Path) -> Path:
    """Put packages/tt and its stand-in for the hardware into the folder `target`."""
    plugins = {"tt_models": "ttnn:register"}
    folder = install(TENSTORRENT, target, **{"quire.general_plugins": plugins})
    shutil.copy(FAKE_TTNN, folder / "ttnn.py")
    return folder


def install(package: Path, target: Path, **more: dict[str, str]) -> Path:
    """Put a package's modules and entry points into the folder `target`, which is returned.

    `more`: by group, further entry points. tests/engine/plugins/test_pip.py compares with pip.
    """
    project = project_of(package)
    points: dict[str, dict[str, str]] = project["entry-points"] | more
    info = target / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    for module in package.glob("*.py"):
        shutil.copy(module, target)
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    lines = [
        line
        for group, named in points.items()
        for line in [f"[{group}]", *(f"{name} = {value}" for name, value in named.items())]
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return target


def project_of(package: Path) -> dict[str, Any]:
    """The table `project` of its pyproject.toml."""
    text = (package / "pyproject.toml").read_text(encoding="utf-8")
    project: dict[str, Any] = tomllib.loads(text)["project"]
    return project
