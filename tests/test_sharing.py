"""`--processes N`: as many tests run, fail and are reported as in one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Two such wait for each other: one process would wait in vain. A worker is given the next file
#: when it begins the last test of one.
MEETS = """
import time
from pathlib import Path

def test_meets(tmp_path):
    folder = Path(__file__).parent
    (folder / "{here}").write_text(str(tmp_path))
    end = time.monotonic() + 60
    while not (folder / "{there}").exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert (folder / "{there}").exists()

def test_last(): pass
"""
MIXED = """
import os, signal, warnings
import pytest

@pytest.fixture(scope="module")
def shared():
    yield []
    open("torn-down", "a").write("once ")

def test_passes(shared):
    shared.append(1)
    warnings.warn("worn thin", UserWarning)

def test_sees_what_its_file_shares(shared):
    assert shared == [1]

@pytest.mark.skip(reason="not today")
def test_skipped():
    pass

@pytest.mark.xfail(reason="known")
def test_xfails():
    assert False

def test_fails():
    print("said before")
    assert 2 + 2 == 5

@pytest.fixture
def broken():
    raise OSError("no such port")

def test_errs(broken):
    pass
"""
DIES = """
import os, signal

def test_before(): pass

def test_dies():
    os.kill(os.getpid(), signal.SIGKILL)

def test_behind(): pass
"""


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """pytest on the folder's files, with no plug-in but this one."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.sharing.plugin", "-c", os.devnull]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    return subprocess.run(
        [*command, f"--rootdir={folder}", "-p", "no:cacheprovider", "-ra", *flags, str(folder)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


def counts(output: str) -> dict[str, int]:
    """By outcome, from pytest's last line."""
    last = output.strip().splitlines()[-1]
    return {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", last)}


def test_every_outcome_is_reported_once_and_a_dead_process_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "test_a_here.py").write_text(MEETS.format(here="a", there="b"))
    (tmp_path / "test_a_there.py").write_text(MEETS.format(here="b", there="a"))
    (tmp_path / "test_dies.py").write_text(DIES)
    (tmp_path / "test_mixed.py").write_text(MIXED)
    done = run(tmp_path, "--processes=2")
    told = {"failed": 2, "passed": 8, "skipped": 1, "xfailed": 1, "warning": 1, "error": 1}
    assert counts(done.stdout) == told, done.stdout
    assert done.returncode == 1
    for words in ("said before", "assert (2 + 2) == 5", "not today", "worn thin", "no such port"):
        assert words in done.stdout, words
    assert "FAILED test_dies.py::test_dies - The process that ran it ended: SIGKILL." in done.stdout
    assert (tmp_path / "torn-down").read_text() == "once "
    assert (tmp_path / "a").read_text() != (tmp_path / "b").read_text()


def test_enough_failures_end_the_run_and_what_stands_is_torn_down(tmp_path: Path) -> None:
    waits = """
import time, pytest

@pytest.fixture
def server():
    open("stands", "w").close()
    yield
    open("torn-down", "w").close()

def test_waits(server):
    time.sleep(200)

def test_never_begins():
    open("began", "w").close()
"""
    fails = """
import os, time

def test_fails():
    while not os.path.exists("stands"):
        time.sleep(0.01)
    assert False
"""
    (tmp_path / "test_a.py").write_text(waits)
    (tmp_path / "test_b.py").write_text(fails)
    done = run(tmp_path, "--processes=2", "-x")
    assert counts(done.stdout)["failed"] == 1, done.stdout
    assert "stopping after 1 failures" in done.stdout
    assert done.returncode == 1
    assert (tmp_path / "torn-down").exists()
    assert not (tmp_path / "began").exists()


def test_what_breaks_a_worker_is_no_pass(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("import os\ndef test_leaves(): os._exit(0)\n")
    (tmp_path / "test_b.py").write_text("def test_passes(): pass\n")
    done = run(tmp_path, "--processes=2")
    assert done.returncode == 1, done.stdout
    assert counts(done.stdout) == {"failed": 1, "passed": 1}
