"""Rules of the house that hold for every file of the product."""

from __future__ import annotations

import ast
import functools
import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STOREYS = ("kernels", "engine", "inference", "platform", "demo")


def sources() -> Iterator[Path]:
    for storey in STOREYS:
        yield from sorted((ROOT / storey).rglob("*.py"))


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Of a file's tree: each rule looks at all of them."""
    # CPython 3.11 refuses to make a tree during which a collection runs finalizers in Python.
    gc.disable()
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        return [node for node in ast.walk(tree) if not isinstance(node, UNASKED)]
    finally:
        gc.enable()


#: Most nodes, and no rule is about them.
UNASKED = (ast.expr_context, ast.operator, ast.cmpop, ast.Name, ast.Constant, ast.arg)


def test_fault_33_nothing_is_validated_by_assert_which_goes_under_python_o() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources()
        for node in nodes_of(path)
        if isinstance(node, ast.Assert)
    ]
    assert found == []


def test_no_pickle_and_no_unsafe_loading() -> None:
    found = []
    for path in sources():
        for node in nodes_of(path):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                # Of weights alone no object is made: `load_format=pt`.
                names = [] if given.get("weights_only") == "True" else ["torch.load"]
            bad = {"pickle", "cloudpickle", "dill", "marshal", "torch.load"} & set(names)
            found += [f"{path.relative_to(ROOT)}:{node.lineno} {name}" for name in bad]
    assert found == []


def test_clients_of_redis_are_made_in_one_place() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in sources()
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "from_url"
    }
    assert found == {"engine/system/redis_client.py"}


#: Where it's known which device it is.
DEVICES = ("engine/devices/", "engine/worker/gpu/", "benchmarks/")


def test_the_engine_asks_what_a_device_can_do_and_never_which_it_is() -> None:
    found = []
    for path in sorted((ROOT / "engine").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if name.startswith(DEVICES):
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.Compare):
                sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
                asks = any(side.endswith((".type", "device", "device.name")) for side in sides)
                if asks and any(side in ("'cuda'", "'cpu'", "'meta'") for side in sides):
                    found.append(f"{name}:{node.lineno}")
            knows = isinstance(node, ast.ImportFrom) and "worker.gpu" in (node.module or "")
            if knows or (isinstance(node, ast.Attribute) and node.attr == "is_cuda"):
                found.append(f"{name}:{node.lineno}")
    assert found == []


def test_errors_are_one_family_in_which_each_has_a_name_of_its_own() -> None:
    classes = [
        (node.name, {ast.unparse(base).rpartition(".")[2] for base in node.bases})
        for path in sources()
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef)
    ]
    family, found = {"QuireError"}, 0
    while len(family) > found:
        found = len(family)
        family |= {name for name, bases in classes if bases & family}
    names = [name for name, bases in classes if bases & family]
    assert found > 40
    assert sorted(names) == sorted(set(names))


def test_fault_33_bad_values_are_refused_under_python_o() -> None:
    script = (
        "from engine import SamplingParams\n"
        "from engine.contract.engine_config import EngineConfig\n"
        "for make in (lambda: SamplingParams(temperature=-1), lambda: SamplingParams(n=0),\n"
        "             lambda: EngineConfig(model='m', block_size=3)):\n"
        "    try:\n"
        "        make()\n"
        "    except ValueError as error:\n"
        "        print(error.param)\n"
    )
    done = subprocess.run(
        [sys.executable, "-O", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["temperature", "n", "block_size"]


def test_the_engines_face_loads_no_torch() -> None:
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    print(name, 'torch' in sys.modules)\n"
    )
    modules = ["engine", "engine.contract.messages", "engine.contract.engine_config", "engine.text"]
    done = subprocess.run(
        [sys.executable, "-c", script, *modules],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [f"{name} False" for name in modules]
