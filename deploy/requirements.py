"""Print the requirements of pyproject.toml, with those of the extras named on the command line.

With `--alone` first, only those of the extras.

`make install` and the image run Quire from a checkout, so only what it needs is installed here.
"""

import sys
import tomllib
from pathlib import Path


def main() -> None:
    """One requirement a line."""
    path = Path(__file__).resolve().parent.parent / "pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    extras = sys.argv[1:]
    alone = "--alone" in extras
    found = [] if alone else list(project["dependencies"])
    for extra in extras[alone:]:
        found += project["optional-dependencies"][extra]
    print("\n".join(requirement.replace(" ", "") for requirement in found))


if __name__ == "__main__":
    main()
