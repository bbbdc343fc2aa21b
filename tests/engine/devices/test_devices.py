"""Devices are found by name; a package that is installed can bring one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.contract import plugins
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.devices import Device, registry
from engine.devices.registry import device_class, make_device
from tests.packages import DEVICE, install

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "demo" / "model"
#: Entry points of two that are no devices.
INVALID_PLUGINS = {
    "toy": "quire_toy:ToyDevice",
    "broken": "quire_nowhere:Device",
    "nodevice": "quire_toy:ModelRunner",
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it is installed."""
    return install(
        DEVICE, tmp_path_factory.mktemp("installed"), **{"quire.devices": INVALID_PLUGINS}
    )


def run(script: str, package: Path) -> Any:
    """What a Python process prints last, as JSON; the package is installed in it."""
    path = os.pathsep.join([str(package), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


GENERATE = f"""
import json, sys
from engine import LLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=8)
def told(device):
    llm = LLM({str(DEMO)!r}, device=device, dtype="float32", max_model_len=256)
    text = llm.generate(["The capital of France is"], params, use_tqdm=False)[0].outputs[0].text
    return [llm.core.executor.worker.device.name, llm.core.capacity.num_blocks, text]
def refusal():
    try:
        LLM({str(DEMO)!r}, device="toy", logits_processors=["engine:AdapterLogitsProcessor"])
    except ValueError as error:
        return str(error)
"""


@pytest.fixture(scope="module")
def answers(package: Path) -> dict[str, Any]:
    """What a CPU says, what is loaded then, and what the package's device says, in a process."""
    script = "cpu = told('cpu')\nloaded = sorted(sys.modules)\n"
    script += "own, refused = told('toy'), refusal()\n"
    script += "print(json.dumps({'cpu': cpu, 'loaded': loaded, 'own': own, 'refused': refused}))"
    return run(GENERATE + script, package)


@pytest.fixture(scope="module")
def refusals(package: Path) -> dict[str, list[list[str]]]:
    """Field and words for each of `REFUSED`, by what QUIRE_PLUGINS names: one process has imported
    all that, and each of its children finds plug-ins anew.
    """
    return run(REFUSE, package)


@pytest.mark.system
def test_a_device_of_an_installed_package_serves_the_demo_model(answers: dict[str, Any]) -> None:
    device_type, blocks, text = answers["own"]
    name, _, expected = answers["cpu"]
    assert (device_type, blocks, name) == ("toy", 128, "cpu")
    assert text == expected
    assert "Paris" in text


def test_a_device_names_the_logits_processors_that_it_cant_run(answers: dict[str, Any]) -> None:
    words = "logits_processors (AdapterLogitsProcessor) aren't supported on the device toy."
    assert words in answers["refused"]
    assert "QUIRE_PLUGINS" in answers["refused"]  # for those that nobody asked for by name


def test_a_replica_on_cpus_loads_nothing_that_a_gpu_needs(answers: dict[str, Any]) -> None:
    loaded = answers["loaded"]
    assert "engine.devices.cpu" in loaded
    assert not [name for name in loaded if name.startswith("engine.worker.gpu")]
    assert "engine.devices.cuda" not in loaded
    assert "triton" not in loaded


REFUSED = [
    ("tpu", {}, "device", "must be one of auto, cpu, cuda, rocm, broken, nodevice, toy"),
    ("broken", {}, "device", "quire_nowhere"),
    ("nodevice", {}, "device", "no subclass of engine.devices.Device"),
    (
        "toy",
        {"kv_cache_dtype": "int8"},
        "kv_cache_dtype",
        "which keeps float32, bfloat16, float16.",
    ),
]
REFUSE = f"""
import json, os
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.devices.registry import make_device
def refused():
    for name, given in {[(name, setting) for name, setting, *_ in REFUSED]!r}:
        try:
            make_device(EngineConfig(model="m", device=name, **given))
            yield "", "it was made"
        except ConfigError as error:
            yield error.param, error.message
found = {{}}
for plugins in ("", "other"):
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        if plugins:
            os.environ["QUIRE_PLUGINS"] = plugins
        with open(writes, "w") as out:
            json.dump([*refused()], out)
        os._exit(0)
    os.close(writes)
    with open(reads) as told:
        found[plugins] = json.load(told)
    os.waitpid(child, 0)
print(json.dumps(found))
"""


@pytest.mark.system
def test_what_is_no_device_or_asks_too_much_is_refused_by_a_sentence(
    refusals: dict[str, list[list[str]]],
) -> None:
    for (name, _, param, words), (named, message) in zip(REFUSED, refusals[""], strict=True):
        assert named == param, name
        assert words in message


def test_plug_ins_that_the_operator_left_out_are_no_devices(
    refusals: dict[str, list[list[str]]],
) -> None:
    assert refusals["other"][-1] == [
        "device",
        "device must be one of auto, cpu, cuda, rocm; got 'toy'.",
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("openvino", "Install packages/openvino"),
        ("xpu", "There is no package for it"),
        ("tpu", "There is no package for it"),
        ("neuron", "There is no package for it"),
        ("tt", "Install packages/tt"),
    ],
)
def test_vllms_devices_are_answered_by_name(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"got '{name}'") as caught:
        EngineConfig(model="m", device=name)
    assert words in caught.value.message


def test_a_platform_of_vllm_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("ascend", "vllm_ascend:register", plugins.VLLM_PLATFORMS)

    def selected(group: str) -> list[EntryPoint]:
        return [point] if group == plugins.VLLM_PLATFORMS else []

    monkeypatch.setattr(plugins, "selected_entry_points", selected)
    with pytest.raises(ConfigError, match="The plug-in ascend is a platform of vLLM"):
        EngineConfig(model="m", device="ascend")


#: Files that know their device: it is theirs alone. `auto` is decided in the registry.
KNOW_THEIR_DEVICE = tuple(
    f"engine/devices/{name}.py" for name in ("accelerator", "cuda", "rocm", "registry")
)
#: Ranks share models on CPUs; the conformance checks compare a name with the requested one.
ASK_FOR_IT = (
    "engine/devices/registry.py",
    "engine/devices/conformance/",
    "engine/executor/rank_settings.py",
)


@pytest.mark.parametrize(
    ("words", "exceptions"),
    [
        (r"torch\.(cuda|xpu|mps|hpu)\b", KNOW_THEIR_DEVICE),
        (r"(config\.device|device\.name) (==|!=|in|not in) ", ASK_FOR_IT),
    ],
)
def test_no_file_of_the_engine_asks_which_device_it_has(
    words: str, exceptions: tuple[str, ...]
) -> None:
    asking = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "engine").rglob("*.py"))
        if re.search(words, path.read_text())
    ]
    assert [name for name in asking if not name.startswith(exceptions)] == []
    assert asking  # the words still find those that may


def test_a_device_that_nobody_brings_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="must be one of auto, cpu, cuda, rocm") as caught:
        EngineConfig(model="m", device="tpu")
    assert caught.value.param == "device"


@pytest.mark.parametrize("name", ["cpu", "cuda", "rocm"])
def test_built_in_devices_are_named_as_they_are_asked_for(name: str) -> None:
    kind = device_class(name)
    assert issubclass(kind, Device)
    assert kind.name == name


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tt": {}}, "has tt, which the device cpu doesn't take"),
        ({"cpu": {"trace_mode": "all"}}, "has trace_mode, which the device cpu doesn't take"),
        ({"cpu": "fast"}, "must have an object of settings under 'cpu'"),
    ],
)
def test_settings_of_another_device_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        make_device(EngineConfig(model="m", device="cpu", additional_config=values))
    assert caught.value.param == "additional_config"


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_a_gpu_that_kernels_arent_compiled_for_is_refused_with_its_number(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    number = ".".join(map(str, capability))
    with pytest.raises(ConfigError, match=f"capability is {number}: .* 8.0 or higher") as refused:
        make_device(EngineConfig(model="m", device="cuda"))
    assert refused.value.param == "device"


@pytest.mark.parametrize(
    ("name", "hip", "words"),
    [
        ("rocm", None, "this torch was built without ROCm"),
        ("rocm", "7.0", "torch sees no AMD GPU"),
        ("cuda", "7.0", "this torch was built for ROCm: name the device rocm"),
    ],
)
def test_a_gpu_of_the_other_vendor_is_refused_by_what_torch_was_built_for(
    name: str, hip: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=words) as refused:
        make_device(EngineConfig(model="m", device=name))
    assert refused.value.param == "device"


@pytest.mark.parametrize(("hip", "name"), [(None, "cuda"), ("7.0", "rocm")])
def test_auto_is_the_gpu_that_torch_was_built_for(
    hip: str | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert registry._auto() == name
