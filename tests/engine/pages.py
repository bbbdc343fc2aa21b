"""Pages on how to add something, followed as they stand."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs" / "extending"


def install(page: str, module: str, folder: Path) -> None:
    """Write the page's code as `module`, installed in `folder` with the page's entry point."""
    text = (DOCS / page).read_text()
    assert f"`{module}.py`" in text
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (project,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    header, *entries = project.splitlines()
    group = header.removeprefix('[project.entry-points."').removesuffix('"]')
    (folder / f"{module}.py").write_text(code)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    name = module.replace("_", "-")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [line.replace('"', "") for line in entries]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]) + "\n")
