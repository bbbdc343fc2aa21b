"""`Executor`: what the engine core asks of whatever runs its steps."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from engine.kv_cache.kv_cache_config import KVCacheConfig
from engine.lora.store import AdapterHost
from engine.models.interface import ModelFacts
from engine.scheduler.plan import GrammarOutput, StepPlan, StepResult
from engine.speculative.interface import DraftHost
from engine.worker.interface import PendingStep

# -- What comes of a step that was begun.


class StepFuture(Protocol):
    """A step's result, which may be still to come; a future is one."""

    def result(self) -> StepResult:
        """Wait for it. Raises what the step ran into."""

    def exception(self) -> BaseException | None:
        """Wait for it; what the step ran into, if anything."""


class LaunchedStep:
    """A step whose launch comes from a thread, and whose result from the device."""

    def __init__(self, launch: Future[PendingStep]) -> None:
        self._launch = launch

    def result(self) -> StepResult:
        """See `StepFuture`."""
        return self._launch.result().finish()

    def exception(self) -> BaseException | None:
        """See `StepFuture`."""
        try:
            self.result()
        except Exception as error:  # handed over, as a future does
            return error
        return None


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a step and the KV cache hold.

    Attributes:
        num_blocks: of the KV pool.
        layout: the model's KV cache groups.
        kv_bytes_per_token: what a token takes of the pool, over all layers.
        token_budget: tokens of a step.
        max_stateful_sequences: whose states the memory holds at once; None: nothing is carried.
    """

    num_blocks: int
    layout: KVCacheConfig
    kv_bytes_per_token: int
    token_budget: int
    max_stateful_sequences: int | None = None


class Executor(Protocol):
    """Loads a model and runs steps of it: here, in other processes, on other machines.

    `load`, `determine_available_blocks` and `allocate_cache` are called once, in this order. One
    thread calls
    everything but `send_bitmask`.

    Attributes:
        supports_async_scheduling: steps are planned while the one before runs, unless the settings
        say otherwise.
        measures_prefill_pace: prompts are to be timed at the start, so that they leave room for
        decodes.
        is_sleeping: some of the memory is given back, and no step can be run.
        adapters, drafts: what is on the device beside the model; from `load` on.
    """

    @property
    def adapters(self) -> AdapterHost: ...

    @property
    def drafts(self) -> DraftHost: ...

    @property
    def supports_async_scheduling(self) -> bool: ...

    @property
    def measures_prefill_pace(self) -> bool: ...

    @property
    def is_sleeping(self) -> bool: ...

    @property
    def numerics_id(self) -> tuple[str, str]:
        """What computes: instruction set or GPU, and the kernels' build."""

    def load(self, progress: Callable[[int, int], None]) -> ModelFacts:
        """Load the model; `progress(done, total)` is called meanwhile.

        Raises `ModelLoadError` or `ConfigError`.
        """

    def determine_available_blocks(self) -> Capacity:
        """How much KV cache there is room for. Raises `ConfigError` where it is too little."""

    def allocate_cache(self) -> None:
        """Make the KV cache; from now on steps can be run."""

    def on_serving(self) -> None:
        """The engine is warm: use idle time to prepare for what comes."""

    # -- steps --------------------------------------------------------------------------------

    def attach(self, value: Any) -> int:
        """Hold what plans name by handle, until `detach`; the handle.

        A tensor, or functions, which only an executor in this process takes (TypeError elsewhere).
        """

    def detach(self, handle: int) -> None:
        """Let an attachment go: no later plan names it."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises whatever the model raises; the batch stays usable."""

    def apply_plan(self, plan: StepPlan) -> None:
        """Take over the changes of a plan that holds no sequence."""

    def execute_async(self, plan: StepPlan) -> StepFuture:
        """Run a step after those submitted before; what comes of it.

        At most one other may be unfinished. After one has failed, all are skipped until `resume`.
        """

    def send_bitmask(self, output: GrammarOutput) -> None:
        """Grammar masks that a step awaits. May be called in any thread."""

    def resume(self) -> None:
        """Run steps again after one has failed; all must be done.

        Raises what a device says that is lost for good: then this process is of no use any more.
        """

    # -- for operators ------------------------------------------------------------------------

    def check_sleep(self) -> None:
        """Raise `ConfigError` unless this model can sleep."""

    def sleep(self, level: int) -> None:
        """Give memory back. No step may be under way, and all sequences are lost."""

    def wake_up(self, tags: Collection[str]) -> None:
        """Take the memory of `tags` again; once nothing sleeps any more, steps can be run.

        Raises `ModelLoadError` where the weights can't be read any more; then they still sleep.
        """

    def check_health(self) -> None:
        """Raise `EngineFault` when no step can ever be run again."""

    def shutdown(self) -> None:
        """End threads and processes, and let memory go. Nothing else is called afterwards."""
