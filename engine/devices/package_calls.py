"""Calls of a package's device and runner: an error names package and method, and so does a call
that doesn't return.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from engine.contract.errors import EngineFault, ModelLoadError, QuireError
from engine.devices.device import Device
from engine.scheduler.plan import StepPlan, StepResult
from engine.worker.interface import PendingStep, Runner, TimesForward

#: Methods of `Device` that are called while requests run.
_WHILE_SERVING = frozenset(
    {"note_step", "on_step_failed", "on_cache_released", "release_memory", "synchronize"}
)
#: By thread, the device and method that it is in, and since when by the monotonic clock.
_calls: dict[int, tuple[str, str, float]] = {}


@contextmanager
def package_call(device: str, method: str, error_type: type[QuireError]) -> Iterator[None]:
    """Within it a method of a package runs.

    Raises `error_type` for whatever isn't a refusal, a lack of memory included.
    """
    thread = threading.get_ident()
    outer = _calls.get(thread)
    _calls[thread] = device, method, time.monotonic()
    try:
        yield
    except QuireError:
        raise
    except Exception as error:  # a package's method may raise anything
        raise error_type(
            f"The device {device} failed in {method}: {type(error).__name__}: {error}",
            param="device",
        ) from error
    finally:
        if outer is None:
            del _calls[thread]
        else:
            _calls[thread] = outer


def describe_long_call(min_seconds: float) -> str:
    """A sentence about the call that has lasted the longest, of those of some length, or ""."""
    now = time.monotonic()
    calls = [(now - start, device, method) for device, method, start in list(_calls.values())]
    seconds, device, method = max(calls, default=(-1.0, "", ""))
    if seconds < min_seconds:
        return ""
    return f"The device {device} has been in {method} for {seconds:.0f} s."


def with_named_calls(kind: type[Device]) -> type[Device]:
    """A package's device, whose methods and properties run in a `package_call`."""

    def named(method: str, function: Callable[..., Any]) -> Callable[..., Any]:
        error_type = EngineFault if method in _WHILE_SERVING else ModelLoadError

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            with package_call(kind.name, method, error_type):
                return function(*arguments, **options)

        return call

    members: dict[str, Any] = {}
    for name in vars(Device):
        member = inspect.getattr_static(kind, name)
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(member, property) and member.fget is not None:
            members[name] = property(named(name, member.fget))
        elif isinstance(member, classmethod):
            members[name] = classmethod(named(name, member.__func__))
        elif inspect.isfunction(member):
            members[name] = named(name, member)
    make_runner = members["make_runner"]
    members["make_runner"] = lambda self, parts: NamedRunner(make_runner(self, parts), kind.name)
    return type(kind.__name__, (kind,), members)


class NamedRunner:
    """A package's runner, whose methods run in a `package_call`."""

    def __init__(self, runner: Runner, device: str) -> None:
        self._runner, self._device = runner, device
        if isinstance(runner, TimesForward):
            self.wrap_forward = runner.wrap_forward

    def execute(self, plan: StepPlan) -> StepResult:
        with package_call(self._device, "Runner.execute", EngineFault):
            return self._runner.execute(plan)

    def prepare(self, plan: StepPlan) -> Any:
        with package_call(self._device, "Runner.prepare", EngineFault):
            return self._runner.prepare(plan)

    def launch(self, plan: StepPlan, inputs: Any) -> PendingStep:
        with package_call(self._device, "Runner.launch", EngineFault):
            return _NamedStep(self._runner.launch(plan, inputs), self._device)

    def reset(self) -> None:
        with package_call(self._device, "Runner.reset", EngineFault):
            self._runner.reset()


class _NamedStep:
    def __init__(self, step: PendingStep, device: str) -> None:
        self._step, self._device = step, device

    def finish(self) -> StepResult:
        with package_call(self._device, "PendingStep.finish", EngineFault):
            return self._step.finish()
