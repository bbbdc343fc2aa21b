"""What is known of a pinned release fails `make lint`; asking is `make audit`'s, and may fail."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FILE = Path(__file__).resolve().parents[2] / "deploy" / "audit.py"
ANSWER = {
    "dependencies": [
        {"name": "Good.Package", "version": "1.0", "vulns": []},
        {"name": "bad", "version": "2.0", "vulns": [{"id": "CVE-1", "fix_versions": ["2.1"]}]},
    ]
}


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program; it must not ask anybody unless a test says what the answer is."""
    spec = importlib.util.spec_from_file_location("audit", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.subprocess, "run", answering(AssertionError("it asks")))
    return module


def answering(what: Any) -> Any:
    def run(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        if isinstance(what, BaseException):
            raise what
        return subprocess.CompletedProcess([], 1, stdout=what)

    return run


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    pins = tmp_path / "pins.txt"
    pins.write_text("# a comment\ngood-package==1.0\nbad==2.0 # why\nnew==3.0\n")
    return [str(pins), "--answer", str(tmp_path / "kept.json")]


def test_lint_asks_nobody_and_fails_for_what_is_known(
    audit: ModuleType,
    files: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert audit.main([*files, "--kept"]) == 0
    assert "`make audit` does" in capsys.readouterr().out
    monkeypatch.setattr(audit.subprocess, "run", answering(json.dumps(ANSWER)))
    assert audit.main(files) == 1
    monkeypatch.setattr(audit.subprocess, "run", answering(AssertionError("it asks")))
    assert audit.main([*files, "--kept"]) == 1
    printed = capsys.readouterr().out
    assert "bad 2.0: CVE-1, mended by 2.1" in printed
    assert "1 with known vulnerabilities; 1 never looked up." in printed
    pins = Path(files[0])
    pins.write_text(pins.read_text().replace("2.0", "2.1"))  # mended
    assert audit.main([*files, "--kept"]) == 0


@pytest.mark.parametrize("what", ["", "no JSON", subprocess.TimeoutExpired("pip-audit", 1)])
def test_without_data_nothing_fails_and_the_last_answer_stays(
    audit: ModuleType, files: list[str], what: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    retained_path = Path(files[2])
    retained_path.write_text(json.dumps(ANSWER | {"asked_at": "then"}))
    monkeypatch.setattr(audit.subprocess, "run", answering(what))
    assert audit.main(files) == 0
    assert json.loads(retained_path.read_text())["asked_at"] == "then"


def test_make_lint_judges_by_what_was_kept() -> None:
    makefile = (FILE.parents[1] / "Makefile").read_text()
    rules = makefile.partition("\nlint-style:")[2].partition("\n\n")[0]
    assert "deploy/audit.py --kept" in rules
    for target in ("lint", "test"):
        needed = makefile.partition(f"\n{target}:")[2].partition("\n")[0]
        assert "lint-style" in needed.split(), target
