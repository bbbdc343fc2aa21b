"""Workers that are copies of a template are processes like others, and so are programs."""

from __future__ import annotations

import re
from pathlib import Path

from tests.inner_run import run_pytest

CONFTEST = """
from tests import copies, template

template.MODULES = ("wave",)

def pytest_configure(config):
    copies.use()
    config.pluginmanager.register(template)
"""
PROGRAM = """
import json, os, sys

print(json.dumps({
    "wave": "wave" in sys.modules, "argv": sys.argv, "it": os.environ.get("IT"),
    "cwd": os.getcwd(), "parent": os.getppid(), "name": __name__, "path": sys.path[0],
    "files": sorted(os.listdir("/proc/self/fd"))[:-1],
}), flush=True)
print(sys.stdin.read(), file=sys.stderr)
sys.exit(3)
"""
TESTS = """
import json, multiprocessing, os, subprocess, sys

def start(**env):
    words = [sys.executable, "../manage.py", "é", "two"]
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    return subprocess.Popen(words, cwd="inside", env=os.environ | env, text=True, **pipes)

def test_a_program_is_a_copy_and_a_child_like_others():
    with start(IT="x") as program:
        told = json.loads(program.stdout.readline())
        rest = program.communicate("what it reads")
    folder = os.getcwd()
    assert told == {
        "wave": True, "argv": ["../manage.py", "é", "two"], "it": "x",
        "cwd": f"{folder}/inside", "parent": os.getpid(), "name": "__main__", "path": folder,
        "files": ["0", "1", "2"],
    }
    assert (rest, program.returncode) == (("", "what it reads\\n"), 3)
    with start() as program:
        assert json.loads(program.stdout.readline())["it"] is None
        program.kill()
        assert program.wait() == -9

def test_what_a_copy_dies_of_is_its_last_word(tmp_path):
    log = tmp_path / "log"
    with log.open("wb") as output:
        words = [sys.executable, "../broken/manage.py"]
        done = subprocess.run(words, stdout=output, stderr=subprocess.STDOUT, cwd="inside")
    assert done.returncode == 1
    said = log.read_text()
    assert said.startswith("before") and said.endswith("KeyError: 'the last word'\\n")

def test_a_program_with_what_libraries_read_when_they_are_loaded_is_no_copy():
    with start(LD_DEBUG_OUTPUT="x") as program:
        assert not json.loads(program.stdout.readline())["wave"]

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
    (tmp_path / "manage.py").write_text(PROGRAM)
    (tmp_path / "inside").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manage.py").write_text(
        "print('before', flush=True)\n{}['the last word']"
    )
    without = ("django", "schemathesis", "asyncio")
    done = run_pytest(tmp_path, "-n2", "--max-worker-restart=1", without=without)
    assert done.returncode == 1, done.stdout
    assert re.search("worker 'gw[01]' crashed while running .*its_death_is_seen", done.stdout)
    assert "1 failed, 5 passed" in done.stdout
