"""`Executor`: what the engine core asks of whatever runs its steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.contract.replica_state import Numerics
from engine.kv_cache.kv_cache_config import KVCacheConfig
from engine.kv_transfer.base import KVConnectorBase
from engine.lora.store import AdapterHost
from engine.models.interface import ModelFacts
from engine.scheduler.plan import GrammarOutput, StepPlan, StepResult
from engine.speculative.interface import DraftHost


class StepFuture(Protocol):
    """A step's result, which may be still to come."""

    def result(self) -> StepResult:
        """Wait for the result. Raises the step's error."""

    def exception(self) -> BaseException | None:
        """Wait for the step; its error, if any."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a step and the KV cache hold.

    Attributes:
        num_blocks: number of blocks of the KV pool.
        layout: the model's KV cache groups.
        kv_bytes_per_token: bytes of the pool that a token takes over all layers.
        token_budget: maximum number of tokens of a step.
        max_stateful_sequences: number of sequences whose states fit into memory; None: sequences
            have no states.
        mixes, runs_whole_prompts, caches_prefixes: facts of the device; see `Device`.
    """

    num_blocks: int
    layout: KVCacheConfig
    kv_bytes_per_token: int
    token_budget: int
    max_stateful_sequences: int | None = None
    mixes: bool = True
    runs_whole_prompts: bool = False
    caches_prefixes: bool = True


class Executor(Protocol):
    """Runs a model's workers: in this process, in other processes, on other machines.

    `load`, `determine_available_blocks` and `allocate_cache` are called once, in this order. One
    thread calls everything but `send_bitmask`.

    Attributes:
        supports_async_scheduling: steps are planned while the previous one runs, unless the
            settings say otherwise.
        measures_prefill_pace: prompts are timed at the start, so that they leave time for decodes.
        is_sleeping: some memory is released, and no step can be run.
        collective_s: seconds that this rank has waited in collectives for others.
        adapters, drafts: what is on the device besides the model.
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
    def collective_s(self) -> float: ...

    def load(self, progress: Callable[[int, int], None]) -> ModelFacts:
        """Load the model; `progress(done, total)` is called meanwhile.

        Raises `ModelLoadError` or `ConfigError`.
        """

    def determine_available_blocks(self) -> Capacity:
        """Size the KV cache by the free memory. Raises `ConfigError` where that is too little."""

    def allocate_cache(self) -> None:
        """Allocate the KV cache; steps can be run from now on."""

    @property
    def kv_connector(self) -> KVConnectorBase | None:
        """Where blocks are saved and loaded outside the KV cache; None: nowhere."""

    def on_serving(self) -> None:
        """The engine is warm: use idle time to prepare for later steps."""

    def read_numerics(self) -> Numerics | None:
        """What decides the bits of the model's tokens, once it is loaded; None, with a warning in
        the log, where the model's files can't be read any more.
        """

    def attach(self, value: Any) -> int:
        """Store an object that plans name by the returned handle, until `detach`.

        A tensor, or functions, which only an executor in this process takes (TypeError elsewhere).
        """

    def detach(self, handle: int) -> None:
        """Remove an attachment that no later plan names."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises whatever the model raises; the batch stays usable."""

    def apply_plan(self, plan: StepPlan) -> None:
        """Apply the changes of a plan that has no sequences to run."""

    def execute_async(self, plan: StepPlan) -> StepFuture:
        """Run a step after those submitted before.

        At most one other may be unfinished. After one has failed, all are skipped until `resume`.
        """

    def send_bitmask(self, output: GrammarOutput) -> None:
        """Send the grammar bitmasks that a step waits for. May be called in any thread."""

    def resume(self) -> None:
        """Run steps again after one has failed; all must be done.

        Raises what a device says that is lost for good: then this process is of no use any more.
        """

    def check_sleep(self) -> None:
        """Raise `ConfigError` unless this model can sleep."""

    def sleep(self, level: int) -> None:
        """Release memory. No step may be in flight, and all sequences are lost."""

    def wake_up(self, tags: Collection[str]) -> None:
        """Restore the memory of `tags`; once nothing sleeps any more, steps can be run.

        Raises `ModelLoadError` where the weights can't be read; then they still sleep.
        """

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of each worker, or a function with each worker; the results by rank.

        Raises `InvalidRequest` for a method that workers don't have.
        """

    def check_health(self) -> None:
        """Raise `EngineFault` when no step can ever be run again."""

    def shutdown(self) -> None:
        """End threads and processes, and release memory. Nothing else is called afterwards."""
