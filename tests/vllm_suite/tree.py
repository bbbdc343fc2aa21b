"""The tree that the tests run in: vLLM's files, with stand-ins for what they import."""

from __future__ import annotations

import shutil
from pathlib import Path

STUBS = Path(__file__).with_name("stubs")
#: Folders whose tests talk to a server that serves text.
FOLDERS = (
    "anthropic",
    "openai/chat_completion",
    "openai/completion",
    "openai/models",
    "openai/responses",
    "openai",
    "rl/state_transitions",
    "scale_out/token_in_token_out",
    "serve/dev/rpc",
    "serve/instrumentator",
    "serve/tokenize",
    "tool_parsers",
)
SERVER = "RemoteOpenAIServer"


def server_tests(source: Path) -> list[str]:
    """The test files that talk to a server, relative to the source tree.

    Raises: FileNotFoundError for a folder that is no source tree of vLLM.
    """
    root = source / "tests" / "entrypoints"
    if not root.is_dir():
        raise FileNotFoundError(f"{source} holds no tests/entrypoints: it's no source of vLLM.")
    found = []
    for folder in FOLDERS:
        for path in sorted((root / folder).glob("test_*.py")):
            if SERVER in path.read_text(encoding="utf-8"):
                found.append(str(path.relative_to(source)))
    return found


def build(source: Path, target: Path) -> None:
    """Copy vLLM's API tests into `target`, beside the stand-ins."""
    tests = target / "tests"
    shutil.copytree(source / "tests" / "entrypoints", tests / "entrypoints")
    (tests / "__init__.py").touch()
    shutil.copy(STUBS / "server.py", tests / "utils.py")
    (target / "vllm").mkdir()
    shutil.copy(STUBS / "vllm_package.py", target / "vllm" / "__init__.py")
    (target / "conftest.py").write_text("import vllm\n", encoding="utf-8")
    (target / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
