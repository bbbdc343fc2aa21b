"""`Executor`: what the engine core asks of whatever runs its steps."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

from engine.contract.adapters import AdapterRef
from engine.executor.outcome import Outcome
from engine.kv_cache.layout import KVLayout
from engine.lora.store import AdapterFacts
from engine.models.facts import ModelFacts
from engine.scheduler.plan import GrammarOutput, StepPlan, StepResult
from engine.speculative.draft_facts import DraftFacts
from engine.speculative.head_plan import HeadFacts, HeadPlan, HeadResult


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a step and the KV cache hold.

    Attributes:
        num_blocks: of the KV pool.
        layout: the model's KV cache groups.
        kv_bytes_per_token: what a token takes of the pool, over all layers.
        token_budget: tokens of a step.
        most_sequences: whose states the memory holds at once; None: nothing is carried.
    """

    num_blocks: int
    layout: KVLayout
    kv_bytes_per_token: int
    token_budget: int
    most_sequences: int | None = None


class Executor(Protocol):
    """Loads a model and runs steps of it: here, in other processes, on other machines.

    `load`, `size_cache` and `allocate_cache` are called once, in this order. One thread calls
    everything but `give_masks`.

    Attributes:
        overlaps: steps are planned while the one before runs, unless the settings say otherwise.
        times_prompts: prompts are to be timed at the start, so that they leave room for decodes.
        asleep: some of the memory is given back, and no step can be run.
    """

    @property
    def overlaps(self) -> bool: ...

    @property
    def times_prompts(self) -> bool: ...

    @property
    def asleep(self) -> bool: ...

    @property
    def arithmetic(self) -> tuple[str, str]:
        """What computes: instruction set or GPU, and the kernels' build."""

    def load(self, progress: Callable[[int, int], None]) -> ModelFacts:
        """Load the model; `progress(done, total)` is called meanwhile.

        Raises `ModelLoadError` or `ConfigError`.
        """

    def size_cache(self) -> Capacity:
        """How much KV cache there is room for. Raises `ConfigError` where it is too little."""

    def allocate_cache(self) -> None:
        """Make the KV cache; from now on steps can be run."""

    def serving(self) -> None:
        """The engine is warm: use idle time to prepare for what comes."""

    # -- steps --------------------------------------------------------------------------------

    def attach(self, value: Any) -> int:
        """Hold what plans name by handle, until `detach`; the handle.

        A tensor, or functions, which only an executor in this process takes (TypeError elsewhere).
        """

    def detach(self, handle: int) -> None:
        """Let an attachment go: no later plan names it."""

    # -- drafts -------------------------------------------------------------------------------

    @property
    def draft(self) -> DraftFacts | None:
        """The draft model of `speculative_config`; None without one."""

    def execute_draft(self, plan: StepPlan) -> StepResult:
        """Run one step of the draft model, which has a batch of its own; as `execute`."""

    @property
    def heads(self) -> HeadFacts | None:
        """The heads of `speculative_config`; None without any."""

    def draw(self, plan: HeadPlan) -> HeadResult:
        """Have the heads draw for sequences that decode, between two steps."""

    # -- adapters -----------------------------------------------------------------------------

    @property
    def adapter_refusal(self) -> str:
        """Why this model has no adapters, as a sentence; "" where it may."""

    @property
    def adapter_bytes(self) -> int:
        """Device memory for adapters."""

    @property
    def most_adapters(self) -> int | None:
        """How many may be on the device at once; None: as many as fit."""

    def load_adapter(self, ref: AdapterRef) -> AdapterFacts:
        """Bring an adapter to the device, where plans may name it. Any thread may call it.

        Raises `InvalidRequest` where it can't be had, or can't be run with this model.
        """

    def drop_adapter(self, digest: str) -> bool:
        """Let an adapter's device memory go: no later plan names it. Whether host memory has it
        still.
        """

    def forget_adapter(self, digest: str) -> None:
        """Let go of what host memory has of an adapter that isn't on the device."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises whatever the model raises; the batch stays usable."""

    def prepare(self, plan: StepPlan) -> None:
        """Take over the changes of a plan that holds no sequence."""

    def submit(self, plan: StepPlan) -> Outcome:
        """Run a step after those submitted before; what comes of it.

        At most one other may be unfinished. After one has failed, all are skipped until `resume`.
        """

    def give_masks(self, output: GrammarOutput) -> None:
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
