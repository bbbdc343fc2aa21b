"""The suite's own parts, on a made-up source tree: what is run, skipped, and explained."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm_suite.__main__ import run_file
from tests.vllm_suite.results import Reasons, Result, StoredResults, page, report
from tests.vllm_suite.tree import build, list_tests

ROOT = Path(__file__).resolve().parents[2]
FILE = "tests/entrypoints/openai/test_made_up.py"
TESTS = """
import pytest
import vllm.envs as envs
from vllm.config import ModelConfig
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.v1.engine import AsyncLLM
from ...utils import RemoteOpenAIServer, multi_gpu_only


def test_what_the_stand_ins_can():
    assert not current_platform.is_rocm() and not envs.VLLM_ANYTHING
    assert ModelConfig(model="any/model").get_vocab_size() == 3072


def test_of_the_insides():
    with pytest.raises(VLLMValidationError):
        AsyncLLM.from_engine_args(1)


@multi_gpu_only(num_gpus=2)
def test_of_gpus():
    assert False


@pytest.mark.parametrize("n", [1, 2])
def test_that_differs(n):
    assert n == 2, "one is not two"


def test_that_waits():
    while True:
        pass
"""
ENDLESS = f"{FILE}::test_that_waits"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source tree with one test file that talks to a server, and one that doesn't."""
    tmp_path = tmp_path_factory.mktemp("suite")
    folder = tmp_path / "source" / "tests" / "entrypoints" / "openai"
    folder.mkdir(parents=True)
    for part in (folder, folder.parent, folder.parent.parent):
        (part / "__init__.py").touch()
    (folder / "test_made_up.py").write_text(TESTS, encoding="utf-8")
    (folder / "test_inside.py").write_text("def test(): pass\n", encoding="utf-8")
    return tmp_path / "source"


def test_files_that_talk_to_a_server_are_found(source: Path, tmp_path: Path) -> None:
    inside = "tests/entrypoints/openai/test_inside.py"
    assert list_tests(source) == ([FILE], [inside])
    with pytest.raises(FileNotFoundError, match="no source of vLLM"):
        list_tests(tmp_path / "elsewhere")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Reasons:
    """Why a test isn't begun."""
    file = tmp_path_factory.mktemp("endless") / "reasons.toml"
    file.write_text(
        f"[[reason]]\nwhy = 'It waits.'\nendless = true\ntests = ['{ENDLESS}']\n", encoding="utf-8"
    )
    return Reasons(file)


@pytest.fixture(scope="module")
def ran(
    source: Path, endless: Reasons, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    """What the file came to, but for what never ends; by name."""
    folder = tmp_path_factory.mktemp("ran")
    build(source, folder / "tree")
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "QUIRE_SUITE_URL": "http://127.0.0.1:1",
        "QUIRE_SUITE_KEY": "key",
        "QUIRE_SUITE_ROOT": str(ROOT),
        "QUIRE_SUITE_MODEL": str(ROOT / "demo" / "model"),
        "QUIRE_SUITE_VERSION": "0",
    }
    file = run_file(FILE, folder, environment, endless.endless(FILE))
    return {result.name: result for result in file}


def test_results_are_told_apart(ran: dict[str, Result]) -> None:
    outcomes = {name.partition("::")[2]: result.outcome for name, result in ran.items()}
    assert outcomes == {
        "test_what_the_stand_ins_can": "passed",
        "test_of_the_insides": "skipped",
        "test_of_gpus": "skipped",
        "test_that_differs[1]": "differs",
        "test_that_differs[2]": "passed",
        "test_that_waits": "differs",
    }
    assert "one is not two" in ran[f"{FILE}::test_that_differs[1]"].message


def test_what_never_ends_isnt_begun(endless: Reasons, ran: dict[str, Result]) -> None:
    assert endless.endless(FILE) == [ENDLESS]
    assert endless.endless("another.py") == []
    assert ran[ENDLESS].message == "It never ends."
    assert endless.of(ENDLESS) == "It waits."


@pytest.fixture
def reasons(tmp_path: Path) -> Reasons:
    path = tmp_path / "reasons.toml"
    text = '[[reason]]\nwhy = "It is small."\ntests = ["a.py::test_x", "b*::*", "d.py"]\n'
    path.write_text(text, encoding="utf-8")
    return Reasons(path)


def test_differences_are_listed_with_their_reasons(tmp_path: Path, reasons: Reasons) -> None:
    stored = StoredResults(tmp_path / "kept.json")
    results = [("test_x[[1]-?]", "differs"), ("test_xy", "differs"), ("test_z", "passed")]
    stored.add("a.py", [Result(f"a.py::{name}", outcome, "m") for name, outcome in results])
    stored.add("b/c.py", [Result("b/c.py::test_y", "differs", "m")])
    text, unknown = report(stored, reasons)
    assert unknown == 1
    assert "1 as vLLM, 3 otherwise, 0 about" in text
    assert "It is small. (2)" in text
    assert text.endswith("Without a reason (1)\n  a.py::test_xy")


def test_results_are_kept_and_become_a_page(tmp_path: Path, reasons: Reasons) -> None:
    stored = StoredResults(tmp_path / "kept.json")
    stored.add("gone.py", [Result("gone.py::test_x", "passed")])
    stored.set_files(["a.py", "c.py", "e.py"], ["d.py"])
    stored.add("a.py", [Result("a.py::test_x", "differs", "m"), Result("a.py::test_y", "passed")])
    stored.add("c.py", [Result("c.py::test_z", "skipped"), Result("c.py::test_w", "differs")])
    again = StoredResults(tmp_path / "kept.json")
    assert (again.by_file, again.waiting) == (stored.by_file, ["e.py"])
    text = page(again, reasons)
    assert "gone.py" not in text
    assert "| `a.py` | 1 | 1 | 0 | 1 |" in text
    assert "| `c.py` | 0 | 1 | 1 | 2 |" in text
    assert "| **all** | 1 | 2 | 1 | |" in text
    assert "1. It is small.\n2. No reason yet.\n\nWithout results yet: `e.py`." in text
    assert text.endswith("- It is small. `d.py`\n")


def test_every_difference_that_is_kept_has_a_reason_and_stands_on_the_page() -> None:
    stored, reasons = StoredResults(), Reasons()
    assert stored.by_file
    assert report(stored, reasons)[1] == 0
    assert all(reasons.of(file) for file in stored.excluded)
    assert (ROOT / "docs" / "vllm-tests.md").read_text(encoding="utf-8") == page(stored, reasons)
