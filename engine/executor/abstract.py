"""`Executor`: the engine core's interface to whatever runs its steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.contract.replica_state import Numerics
from engine.kv_cache.kv_cache_config import KVCacheConfig
from engine.kv_transfer.base import KVConnectorBase
from engine.lora.store import AdapterHost
from engine.model_loader.vllm_config import VllmConfig
from engine.models.interface import ModelFacts
from engine.scheduler.plan import GrammarOutput, StepPlan, StepResult
from engine.speculative.interface import DraftHost


class StepFuture(Protocol):
    """A step's result, possibly still pending."""

    def result(self) -> StepResult:
        """Wait for the result. Raises the step's error."""

    def exception(self) -> BaseException | None:
        """Wait for the step; returns its error, if any."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of a step and of the KV cache.

    Attributes:
        num_blocks: number of blocks of the KV pool.
        layout: the model's KV cache groups.
        kv_bytes_per_token: bytes of the pool per token over all layers.
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

    `load`, `determine_available_blocks` and `allocate_cache` are called once, in this order. All
    calls except `send_bitmask` come from one thread.

    Attributes:
        supports_async_scheduling: steps are planned while the previous one runs, by default.
        measures_prefill_pace: prompts are timed at startup, so that their share of a step can be
            limited.
        is_sleeping: some memory is released, and no step can be run.
        collective_s: seconds that this rank has waited for others in collectives.
        vllm_config: the settings and the model's properties, with vLLM's names.
        adapters, drafts: what is on the device in addition to the model.
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

    @property
    def vllm_config(self) -> VllmConfig: ...

    def load(self, progress: Callable[[int, int], None]) -> ModelFacts:
        """Load the model; `progress(done, total)` is called meanwhile.

        Raises `ModelLoadError` or `ConfigError`.
        """

    def determine_available_blocks(self) -> Capacity:
        """Size the KV cache by the free memory. Raises `ConfigError` if there isn't enough."""

    def allocate_cache(self) -> None:
        """Allocate the KV cache; steps can be run from now on."""

    @property
    def kv_connector(self) -> KVConnectorBase | None:
        """Saves and loads blocks outside the KV cache; None: nothing does."""

    def on_serving(self) -> None:
        """Called after warm-up: use idle time to prepare for later steps."""

    def read_numerics(self) -> Numerics | None:
        """Return what determines the bits of the loaded model's tokens; None, with a logged
        warning, if the model's files can't be read any more.
        """

    def attach(self, value: Any) -> int:
        """Store an object that plans refer to by the returned handle, until `detach`.

        A tensor, or functions, which are supported only in this process (TypeError elsewhere).
        """

    def detach(self, handle: int) -> None:
        """Remove an attachment that no later plan refers to."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises what the model raises; the batch stays usable."""

    def apply_plan(self, plan: StepPlan) -> None:
        """Apply the changes of a plan that has no sequences to run."""

    def execute_async(self, plan: StepPlan) -> StepFuture:
        """Run a step after those submitted before.

        At most one other may be unfinished. After one has failed, all are skipped until `resume`.
        """

    def send_bitmask(self, output: GrammarOutput) -> None:
        """Send the grammar bitmasks that a step waits for. May be called from any thread."""

    def resume(self) -> None:
        """Resume running steps after one has failed; all must be done.

        Raises the device's error if the device is permanently lost: then this process is unusable.
        """

    def check_sleep(self) -> None:
        """Raise `ConfigError` unless this model can sleep."""

    def sleep(self, level: int) -> None:
        """Release memory. No step may be in flight, and all sequences are lost."""

    def wake_up(self, tags: Collection[str]) -> None:
        """Restore the memory of `tags`; once nothing sleeps any more, steps can be run.

        Raises `ModelLoadError` if the weights can't be read; then they stay asleep.
        """

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of each worker, or a function with each worker; returns the results by
        rank.

        Raises `InvalidRequest` for a method that workers don't have.
        """

    def check_health(self) -> None:
        """Raise `EngineFault` if no further step can be run."""

    def shutdown(self) -> None:
        """Stop threads and processes, and release memory. Nothing else is called afterwards."""
