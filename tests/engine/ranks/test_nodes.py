"""Ranks on several machines say what one rank says, to the bit; what is lost is noticed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError, EngineFault
from tests.engine.ranks.test_tensor_parallel import outputs, running
from tests.waiting import free_port

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("compiler")]

Folder = Callable[[str], Path]
ROOT = Path(__file__).resolve().parents[3]
#: Of a program that runs the first rank in a namespace of its own, and is asked by lines.
PROGRAM = """
import json, sys, time
from pathlib import Path
from tests.engine.ranks.test_tensor_parallel import outputs, running
settings = json.loads(sys.argv[2])
with running(Path(sys.argv[1]), **settings) as llm:
    print(json.dumps(outputs(llm)), flush=True)
    sys.stdin.readline()
    start = time.monotonic()
    try:
        while time.monotonic() < start + 60:
            outputs(llm)
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error), time.monotonic() - start]), flush=True)
"""


@contextmanager
def second_node(settings: dict[str, Any], *prefix: str) -> Iterator[subprocess.Popen[bytes]]:
    """The process that `quire serve --headless --node-rank 1` becomes."""
    process = subprocess.Popen(
        [
            *(*prefix, sys.executable, "-m", "engine.executor.node"),
            json.dumps({**settings, "node_rank": 1}),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def on_two_nodes(host: str, port: int, size: int = 1, num_stages: int = 2) -> dict[str, Any]:
    return {
        "nnodes": 2,
        "master_addr": host,
        "master_port": port,
        "pipeline_parallel_size": num_stages,
        "tensor_parallel_size": size,
    }


@pytest.mark.slow
def test_a_node_joins_each_engine_in_turn(model_folder: Folder) -> None:
    folder = model_folder("llama")
    with running(folder, 1) as llm:
        expected = outputs(llm)
    settings = on_two_nodes("127.0.0.1", free_port())
    size = settings["tensor_parallel_size"]
    rest = {name: value for name, value in settings.items() if name != "tensor_parallel_size"}
    with second_node(settings):
        for _ in range(2):
            with running(folder, size, **rest) as llm:
                assert outputs(llm) == expected
                runner = llm.core.executor.worker._runner
                choose_tokens, failures = runner._choose_tokens, [RuntimeError("one bad step")]

                def fail_once(
                    *arguments: Any,
                    failures: list[RuntimeError] = failures,
                    choose: Callable[..., Any] = choose_tokens,
                ) -> Any:
                    if failures:
                        raise failures.pop()
                    return choose(*arguments)

                runner._choose_tokens = fail_once
                assert outputs(llm) == expected  # after all ranks have been reset
                assert not failures


def test_a_node_starts_its_ranks_from_any_folder(tmp_path: Path) -> None:
    options = {**on_two_nodes("127.0.0.1", 1), "node_rank": 1}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    with subprocess.Popen(
        [sys.executable, str(ROOT / "manage.py"), "up", "--headless", *words], cwd=tmp_path
    ) as node:
        children = Path(f"/proc/{node.pid}/task/{node.pid}/children")
        try:
            while not children.read_text():
                assert node.poll() is None
                time.sleep(0.1)
        finally:
            node.terminate()
        assert node.wait(60) == 0


@contextmanager
def two_machines() -> Iterator[tuple[str, str, str]]:
    """Two network namespaces, joined by a cable; the first one's name, address, the second's."""
    first, second = f"quire-a-{os.getpid()}", f"quire-b-{os.getpid()}"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    names: list[str] = []
    try:
        for name in (first, second):
            ip("netns", "add", name)
            names.append(name)
        ip("link", "add", "cable", "netns", first, "type", "veth", "peer", "cable", "netns", second)
        for name, address in ((first, "10.9.8.1/24"), (second, "10.9.8.2/24")):
            ip("-n", name, "address", "add", address, "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield first, "10.9.8.1", second
    except (OSError, subprocess.CalledProcessError) as error:
        if len(names) < 2:
            pytest.skip(f"Network namespaces can't be made here: {error}")
        raise
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "num_stages"), [("link", 2), ("killed", 2), ("frozen", 2), ("link", 1), ("frozen", 1)]
)
def test_ranks_of_two_machines_give_the_bits_of_one_and_a_lost_one_is_noticed(
    model_folder: Folder, lost: str, num_stages: int
) -> None:
    if shutil.which("ip") is None:
        pytest.skip("Network namespaces are made by iproute2's ip.")
    folder = model_folder("llama")
    with running(folder, 1) as llm:
        expected = outputs(llm)
    with two_machines() as (first, address, second):
        settings = on_two_nodes(address, 29501, 2, num_stages)
        rest = {"size": settings["tensor_parallel_size"], **settings}
        del rest["tensor_parallel_size"]
        with (
            second_node(settings, "ip", "netns", "exec", second) as node,
            subprocess.Popen(
                [
                    *("ip", "netns", "exec", first, sys.executable, "-c", PROGRAM, str(folder)),
                    json.dumps(rest),
                ],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            ) as engine,
        ):
            assert engine.stdin is not None
            assert engine.stdout is not None
            assert json.loads(engine.stdout.readline()) == json.loads(json.dumps(expected))
            engine.stdin.write("lose a rank\n")
            engine.stdin.flush()
            time.sleep(0.2)  # in the middle of it
            if lost == "link":
                subprocess.run(["ip", "-n", first, "link", "set", "cable", "down"], check=True)
            else:
                ranks = subprocess.check_output(["pgrep", "-P", str(node.pid)], text=True).split()
                blow = signal.SIGKILL if lost == "killed" else signal.SIGSTOP
                os.kill(int(ranks[-1]), blow)
            kind, message, seconds = json.loads(engine.stdout.readline())
            assert kind == EngineFault.__name__
            assert message.startswith(("Rank 3", "Rank 2") if num_stages == 2 else "Rank 1")
            print(f"{lost}: noticed after {seconds:.1f} s: {message}")
            assert engine.wait(60) == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tensor_parallel_size": 3}, r"must be a multiple of nnodes \(2\); got 3"),
        ({"pipeline_parallel_size": 2, "node_rank": 2}, r"node_rank must be below nnodes \(2\)"),
        ({"distributed_executor_backend": "ray"}, "nnodes is for distributed_executor_backend=mp"),
    ],
)
def test_what_nodes_cannot_share_is_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineConfig(model="m", nnodes=2, **changes)
