"""`platform/` is a source root: the standard library keeps its module of that name."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]


def test_import_platform_is_the_standard_librarys() -> None:
    code = "import platform; print(platform.__file__); print(platform.python_version())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.splitlines()[0]) == Path(sysconfig.get_path("stdlib")) / "platform.py"


def test_import_platform_under_manage_py_is_the_standard_librarys() -> None:
    code = "import platform; print(platform.__file__)"
    done = subprocess.run(
        [sys.executable, "manage.py", "shell", "--no-imports", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip().endswith("platform.py")
    assert str(ROOT) not in done.stdout


def test_the_folder_is_no_package() -> None:
    assert not (ROOT / "platform" / "__init__.py").exists()
