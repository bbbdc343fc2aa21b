"""Workers that collect the files that they run find what one process finds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.inner_run import run_pytest

FILES = {
    "pytest.ini": """
        [pytest]
        markers = slow
            django_db
            timeout
        addopts = -m "not slow"
        asyncio_default_fixture_loop_scope = function
    """,
    "conftest.py": """
        import pytest
        from tests import collecting
        from tests.order import pytest_collection_modifyitems, pytest_xdist_make_scheduler

        def pytest_configure(config):
            config.pluginmanager.register(collecting)

        @pytest.fixture(scope="session")
        def left():
            yield
            assert False, "all's rest"
    """,
    "one/__init__.py": "",
    "one/conftest.py": """
        import time

        import pytest

        @pytest.fixture(scope="package")
        def shared():
            time.sleep(0.01)
            yield []
            assert False, "a folder's rest"
    """,
    "one/test_first.py": """
        import pytest

        def test_it_begins(shared):
            shared.append(1)

        @pytest.mark.parametrize("number", range(3))
        def test_it_fails_once(number):
            assert number != 1

        @pytest.mark.slow
        def test_slow():
            assert False
    """,
    "one/test_second.py": """
        def test_what_a_folder_shares_stays(shared):
            assert shared == [1]
    """,
    "two/__init__.py": "",
    "two/test_broken.py": "import nothing_of_this_name",
    "two/test_dies.py": """
        import os

        def test_it_passes():
            pass

        def test_it_dies():
            os._exit(1)
    """,
    "two/test_none.py": """
        import pytest

        @pytest.mark.slow
        def test_slow():
            assert False
    """,
    "two/test_skipped.py": """
        import pytest

        pytest.skip("not here", allow_module_level=True)
    """,
    "two/test_last.py": """
        class TestIt:
            def test_it_ends(self, left):
                pass
    """,
}
#: Failures are a case and a file that its worker died of; errors a file that can't be imported, and
#: what was to be taken down of a folder and of all.
FOUND = {"passed": 6, "failed": 2, "skipped": 1, "error": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("suite")
    for name, text in FILES.items():
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text(re.sub(r"^ {8}", "", text.lstrip("\n"), flags=re.M))
    return made


def run(folder: Path, workers: int, *flags: str) -> tuple[int, str]:
    """The status and what was printed."""
    without = ("django", "schemathesis", "timeout")
    done = run_pytest(folder, f"-n{workers}", "--dist=loadfile", *flags, without=without)
    return done.returncode, done.stdout


def counted(said: str) -> dict[str, int]:
    """The numbers of its last line."""
    found = re.findall(r"(\d+) (passed|failed|skipped|error)", said.splitlines()[-1])
    return {word: int(number) for number, word in found}


def test_all_is_run_and_whatever_fails_is_seen_and_run_again(folder: Path) -> None:
    status, said = run(folder, 1)
    assert (status, counted(said)) == (1, FOUND), said
    for words in ("test_it_fails_once[1]", "nothing_of_this_name", "a folder's rest", "all's rest"):
        assert words in said
    assert "crashed while running 'two/test_dies.py'" in said
    for name in ("broken", "dies"):  # or nothing else would be
        (folder / f"two/test_{name}.py").unlink()
    # What failed, what the rests were of, and that without the test that it follows.
    status, said = run(folder, 0, "--last-failed")
    again = {"passed": 1, "failed": 2, "error": 2}
    assert (status, counted(said)) == (1, again), said


def test_a_chosen_test_runs_alone(folder: Path) -> None:
    for flags in (["-k", "it_begins", "one"], ["one/test_first.py::test_it_begins"]):
        status, said = run(folder, 1, *flags)
        assert (status, counted(said)) == (1, {"passed": 1, "error": 1}), said  # a folder's rest


def test_a_set_up_that_takes_its_time_is_told_of(folder: Path) -> None:
    said = run(folder, 1, "--durations=0", "one")[1]
    assert re.findall(r"s setup +(\S+)", said) == ["one/test_first.py::test_it_begins"], said
