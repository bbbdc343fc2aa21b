"""Workers that are copies of a template are processes like others."""

from __future__ import annotations

import re
from pathlib import Path

from tests.inner_run import run_pytest

CONFTEST = """
from tests import template

template.MODULES = ("wave",)

def pytest_configure(config):
    config.pluginmanager.register(template)
"""
TESTS = """
import multiprocessing, os, subprocess, sys

def test_it_has_what_the_template_imported():
    assert "wave" in sys.modules

def test_it_starts_processes_of_every_kind():
    assert subprocess.run([sys.executable, "-c", "print(1)"], stdout=-1).stdout == b"1\\n"
    for kind in ("fork", "spawn"):
        process = multiprocessing.get_context(kind).Process(target=os.getpid)
        process.start()
        process.join()
        assert process.exitcode == 0

def test_its_death_is_seen():
    os._exit(0)
"""


def test_copies_run_tests_and_the_death_of_one_is_seen(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    without = ("django", "schemathesis", "asyncio")
    done = run_pytest(tmp_path, "-n2", "--max-worker-restart=1", without=without)
    assert done.returncode == 1, done.stdout
    assert re.search("worker 'gw[01]' crashed while running .*its_death_is_seen", done.stdout)
    assert "1 failed, 2 passed" in done.stdout
