"""A device package that raises, has no memory or hangs, in each call: a sentence names both."""

from __future__ import annotations

import inspect
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, LoRARequest, SamplingParams
from engine.devices import Device, RunnerInputs, registry
from engine.devices.conformance.models import TinyModel, write_adapter
from engine.devices.cpu import CpuDevice
from engine.devices.package_calls import describe_long_call
from engine.worker.interface import PendingStep, Runner
from kernels import KernelSet
from kernels.reference import ReferenceKernels

PARAMS = SamplingParams(temperature=0, max_tokens=3)
DEVICE_CALLS = sorted(
    name
    for name, member in vars(Device).items()
    if not name.startswith("_") and (inspect.isroutine(member) or isinstance(member, property))
)
#: Of models with states and of traces, and properties that nobody overrides.
NOT_CALLED = {"max_checkpoints", "max_states", "additional_config", "synchronize", "torch_device"}
RUNNER_CALLS = ["Runner.execute", "Runner.prepare", "Runner.launch", "Runner.reset"]
CALLS = [*(name for name in DEVICE_CALLS if name not in NOT_CALLED), *RUNNER_CALLS]
#: Those that `make test` has run out of memory and hang; the others are slow checks.
SAMPLE = {"build_model", "num_blocks", "make_runner", "offload", "Runner.execute"}
METHODS = [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in CALLS]
#: Calls of steps that are planned ahead.
AHEAD = {"Runner.prepare", "Runner.launch", "PendingStep.finish"}


class Trouble:
    """What a call of the package runs into, once it's armed."""

    def __init__(self, method: str, cause: Callable[[], None]) -> None:
        self.method, self.cause = method, cause

    def meet(self, method: str) -> None:
        if method == self.method:
            self.cause()


class TroubledStep:
    def __init__(self, step: PendingStep, trouble: Trouble) -> None:
        self._step, self._trouble = step, trouble

    def finish(self) -> Any:
        self._trouble.meet("PendingStep.finish")
        return self._step.finish()


class TroubledRunner:
    """A runner whose methods meet trouble before they do what they should."""

    def __init__(self, runner: Runner, trouble: Trouble) -> None:
        self._runner, self._trouble = runner, trouble

    def execute(self, plan: Any) -> Any:
        self._trouble.meet("Runner.execute")
        if self._trouble.method == "Runner.reset" or "step_failed" in self._trouble.method:
            raise ValueError("a step that fails")
        return self._runner.execute(plan)

    def prepare(self, plan: Any) -> Any:
        self._trouble.meet("Runner.prepare")
        return self._runner.prepare(plan)

    def launch(self, plan: Any, inputs: Any) -> Any:
        self._trouble.meet("Runner.launch")
        return TroubledStep(self._runner.launch(plan, inputs), self._trouble)

    def reset(self) -> None:
        self._trouble.meet("Runner.reset")
        self._runner.reset()


def troubled_device(trouble: Trouble) -> type[Device]:
    """A package's device."""

    class Package(CpuDevice):
        name = "package"

        def make_kernels(self) -> KernelSet:
            return ReferenceKernels()

        def make_runner(self, parts: RunnerInputs) -> Runner:
            return TroubledRunner(super().make_runner(parts), trouble)

    for name in DEVICE_CALLS:
        member = inspect.getattr_static(Package, name)
        function = getattr(member, "fget", None) or getattr(member, "__func__", member)

        def meets(*arguments: Any, _name: str = name, _function: Any = function) -> Any:
            trouble.meet(_name)
            return _function(*arguments)

        kind = type(member) if isinstance(member, property | classmethod) else lambda f: f
        setattr(Package, name, kind(meets))
    Package.__module__ = "package"
    return Package


def use(folder: Path, method: str, adapter: Path) -> None:
    """Load a model, ask it, have it sleep and wake, and end: each call of a device is made."""
    settings = {"enable_sleep_mode": True, "async_scheduling": method in AHEAD}
    llm = LLM(
        str(folder), device="cpu", num_gpu_blocks_override=30, max_model_len=64,
        enable_lora=True, **settings,
    )  # fmt: skip
    try:
        request = LoRARequest("adapter", 1, str(adapter))
        for lora in (None, request):
            (output,) = llm.generate([[5, 6, 7]], PARAMS, lora_request=lora, use_tqdm=False)
            if output.error is not None:
                raise RuntimeError(str(output.error))
        llm.core.executor.on_serving()
        llm.core.executor.read_numerics()
        llm.sleep(1)
        llm.wake_up()
    finally:
        llm.core.shutdown()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a model and of an adapter for it."""
    folder = tmp_path_factory.mktemp("tiny")
    model = TinyModel("llama", folder / "model")
    write_adapter(folder / "adapter", model)
    return model.folder, folder / "adapter"


@pytest.fixture
def troubled(monkeypatch: pytest.MonkeyPatch) -> Callable[[Trouble], None]:
    """Has `device="cpu"` be the package's device."""

    def use_device(trouble: Trouble) -> None:
        kind = troubled_device(trouble)
        monkeypatch.setattr(registry, "device_class", lambda name: kind)

    return use_device


def check_failure(tiny: tuple[Path, Path], troubled: Any, method: str, error: Exception) -> None:
    def fail() -> None:
        raise error

    troubled(Trouble(method, fail))
    sentence = f"The device package failed in {method}: {type(error).__name__}: {error}"
    with pytest.raises(Exception, match=re.escape(sentence)):
        use(tiny[0], method, tiny[1])


@pytest.mark.parametrize("method", [*CALLS, "PendingStep.finish"])
def test_a_call_that_raises_is_named(tiny: tuple[Path, Path], troubled: Any, method: str) -> None:
    check_failure(tiny, troubled, method, ValueError("a bug"))


@pytest.mark.parametrize("method", METHODS)
def test_a_call_without_memory_is_named(
    tiny: tuple[Path, Path], troubled: Any, method: str
) -> None:
    check_failure(tiny, troubled, method, MemoryError("no memory left"))


@pytest.mark.parametrize("method", METHODS)
def test_a_call_that_hangs_is_named_while_it_does(
    tiny: tuple[Path, Path], troubled: Any, method: str
) -> None:
    reached, goes_on = threading.Event(), threading.Event()

    def hang() -> None:
        reached.set()
        if not goes_on.wait(60):
            raise TimeoutError("nobody looked")

    troubled(Trouble(method, hang))
    done = threading.Thread(target=use, args=(tiny[0], method, tiny[1]), daemon=True)
    done.start()
    try:
        assert reached.wait(60)
        assert describe_long_call(0).startswith(f"The device package has been in {method} for ")
        assert describe_long_call(3600) == ""
    finally:
        goes_on.set()
        done.join(60)
    assert not done.is_alive()
    deadline = time.monotonic() + 60  # a step that was planned ahead may still run
    while describe_long_call(0) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert describe_long_call(0) == ""
