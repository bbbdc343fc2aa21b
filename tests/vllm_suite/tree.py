"""The tree that the tests run in: vLLM's files, with stand-ins for what they import."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

STUBS = Path(__file__).with_name("stubs")
SERVER = "RemoteOpenAIServer"
#: Helpers of vLLM's tests that are no server's, and need nothing of vLLM.
HELPERS = ("models/utils.py", "models/language/pooling/embed_utils.py")
#: A test that gets its server from the `conftest.py` beside it.
_CLIENT = re.compile(r"^(?:async )?def test\w*\([^)]*\b(?:client|server)\b", re.MULTILINE)


def list_tests(source: Path) -> tuple[list[str], list[str]]:
    """The test files of vLLM's entry points, relative to the source tree: those that talk to a
    server, and those that call vLLM's own modules.

    Raises: FileNotFoundError for a folder that is no source tree of vLLM.
    """
    root = source / "tests" / "entrypoints"
    if not root.is_dir():
        raise FileNotFoundError(f"{source} holds no tests/entrypoints: it's no source of vLLM.")
    talking, other_files = [], []
    for path in sorted(root.rglob("test_*.py")):
        kind = talking if _talks(path) else other_files
        kind.append(str(path.relative_to(source)))
    return talking, other_files


def _talks(path: Path) -> bool:
    text, near = path.read_text(encoding="utf-8"), path.with_name("conftest.py")
    if SERVER in text:
        return True
    shared = near.is_file() and SERVER in near.read_text(encoding="utf-8")
    return shared and _CLIENT.search(text) is not None


def build(source: Path, target: Path) -> None:
    """Copy vLLM's API tests into `target`, beside the stand-ins."""
    tests = target / "tests"
    shutil.copytree(source / "tests" / "entrypoints", tests / "entrypoints")
    (tests / "__init__.py").touch()
    shutil.copy(STUBS / "server.py", tests / "utils.py")
    for helper in HELPERS:
        if (source / "tests" / helper).is_file():
            copy = tests / helper
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / "tests" / helper, copy)
    (target / "vllm").mkdir()
    shutil.copy(STUBS / "vllm_package.py", target / "vllm" / "__init__.py")
    shutil.copy(STUBS / "fixtures.py", target / "conftest.py")
    (target / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
