"""The example of a production environment, and that its settings hold up."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.variables import DECLARED_VARIABLES, ROOT, named_in

EXAMPLE = (ROOT / "deploy" / "environment.example").read_text()
DOCS = "\n".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))


def test_the_example_names_settings_alone() -> None:
    names = set(re.findall(r"^#?([A-Z_]+)=", EXAMPLE, re.M))
    assert names <= DECLARED_VARIABLES | {"FORWARDED_ALLOW_IPS", "POSTGRES_PASSWORD"}
    assert {"QUIRE_SECRET_KEY", "QUIRE_ALLOWED_HOSTS", "DATABASE_URL", "REDIS_URL"} <= names
    # systemd and compose both take NAME=value, one a line, comments on lines of their own.
    for line in EXAMPLE.splitlines():
        assert not line or line.startswith("#") or re.fullmatch(r"[A-Z_]+=\S*", line), line


def test_every_variable_that_is_read_is_documented() -> None:
    assert DECLARED_VARIABLES - named_in(DOCS) == set()


@pytest.mark.parametrize("folder", ["docs", "deploy", "."])
def test_every_variable_that_is_documented_is_read(folder: str) -> None:
    for path in (ROOT / folder).glob("*.md"):
        assert named_in(path.read_text()) <= DECLARED_VARIABLES, path.name


@pytest.mark.system
def test_the_production_check_is_clean(tmp_path: Path) -> None:
    values = dict(re.findall(r"^([A-Z_]+)=(\S+)$", EXAMPLE, re.M))
    values |= {
        "QUIRE_SECRET_KEY": "k3Jq" * 16 + "Zx81-_",
        "QUIRE_DATA_DIR": str(tmp_path),
    }
    clean = {name: value for name, value in os.environ.items() if name not in DECLARED_VARIABLES}
    done = subprocess.run(
        [sys.executable, "manage.py", "check", "--deploy", "--fail-level", "WARNING"],
        cwd=ROOT,
        env=clean | values,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr.strip()) == (0, "")
    assert "no issues" in done.stdout
