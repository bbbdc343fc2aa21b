"""The executor that the settings ask for."""

from __future__ import annotations

from engine.contract.config import EngineConfig
from engine.executor.executor import Executor
from engine.executor.in_process import InProcessExecutor


def in_process(executor: Executor) -> InProcessExecutor:
    """`executor`, for those who look at the model itself: benchmarks and surveys.

    Raises TypeError where the model isn't in this process.
    """
    if not isinstance(executor, InProcessExecutor):
        raise TypeError(f"{type(executor).__name__} runs no model in this process.")
    return executor


def make_executor(config: EngineConfig) -> Executor:
    """One that runs the model in this process.

    Raises `ConfigError` for a device that isn't there.
    """
    return InProcessExecutor(config)
