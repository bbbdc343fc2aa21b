"""The examples of docs/extending.md, installed as they stand."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"


def section(heading: str) -> str:
    """The text below a heading of the page."""
    return PAGE.read_text().split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def install(heading: str, module: str, folder: Path) -> None:
    """Write a section's code as `module`, installed in `folder` with the section's entry point."""
    text = section(heading)
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
