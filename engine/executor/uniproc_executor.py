"""`UniProcExecutor`: one worker in this process."""

from __future__ import annotations

import queue
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import EngineFault, InvalidRequest
from engine.contract.replica_state import Numerics
from engine.devices.threads import JoinedThread
from engine.distributed.memory import RankMemory
from engine.distributed.pipeline import StageSockets
from engine.executor.abstract import Capacity, StepFuture
from engine.executor.expert_lockstep import ExpertLockstep
from engine.executor.worker import Worker
from engine.kv_transfer.base import KVConnectorBase
from engine.lora.store import AdapterHost
from engine.model_loader.vllm_config import VllmConfig
from engine.models.interface import ModelFacts
from engine.scheduler.plan import GrammarOutput, StepPlan, StepResult
from engine.speculative.interface import DraftHost
from engine.worker.interface import PendingStep


class StepSkipped(RuntimeError):
    """A step wasn't run, because the previous one failed."""


@dataclass(slots=True)
class _QueuedStep:
    run: Callable[[], Any]
    future: Future[Any]
    attempt: int


class StepThread:
    """A thread that runs submitted steps in order, while the engine prepares the next one.

    A step builds on the previous one. So once one has failed, all submitted steps are skipped until
    `resume`.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_QueuedStep | None] = queue.SimpleQueue()
        self._attempt = 0
        self._broken = False
        end = partial(self._queue.put, None)
        self._thread = JoinedThread(_run_all, self._queue, name="steps", tell_end=end)
        self._thread.start()
        # The thread holds no reference to this object nor, between steps, to the submitting
        # objects, so it stops when they are collected.
        self._end = weakref.finalize(self, end)

    @property
    def is_alive(self) -> bool:
        """Whether it runs submitted steps."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop the thread after the submitted steps."""
        self._end()

    def submit(self, prepare: Callable[[], Callable[[], Any]]) -> Future[Any]:
        """Call `prepare` now, and the function that it returns in the thread, after earlier
        steps.
        """
        future: Future[Any] = Future()
        if self._broken:
            future.set_exception(StepSkipped("An earlier step failed."))
            return future
        try:
            run = prepare()
        except Exception as error:  # invalid inputs; the engine rolls the step back
            self._broken = True
            future.set_exception(error)
            return future
        self._queue.put(_QueuedStep(run, future, self._attempt))
        return future

    def resume(self) -> None:
        """Run steps submitted from now on. All earlier ones must be done."""
        self._attempt += 1
        self._broken = False


def _run_all(steps: queue.SimpleQueue[_QueuedStep | None]) -> None:
    failed_attempt = -1
    while (step := steps.get()) is not None:
        if step.attempt <= failed_attempt:
            step.future.set_exception(StepSkipped("An earlier step failed."))
            continue
        try:
            step.future.set_result(step.run())
        except BaseException as error:
            failed_attempt = step.attempt
            step.future.set_exception(error)
        del step  # otherwise it would live until the next step comes


class LaunchedStep:
    """A step that is launched in a thread, and whose result comes from the device."""

    def __init__(self, launch: Future[PendingStep]) -> None:
        self._launch = launch

    def result(self) -> StepResult:
        return self._launch.result().finish()

    def exception(self) -> BaseException | None:
        try:
            self.result()
        except Exception as error:  # returned, as futures do
            return error
        return None


def find_worker_method(name: str) -> Callable[..., Any]:
    """A public method of workers. Raises `InvalidRequest` for an unknown name."""
    method = getattr(Worker, name, None)
    if not callable(method) or name.startswith("_"):
        raise InvalidRequest(f"Workers have no method {name!r}.", param="method")
    return method


class UniProcExecutor:
    """Runs the only worker's steps in the caller's thread, or in a `StepThread`."""

    def __init__(
        self,
        config: EngineConfig,
        memory: RankMemory | None = None,
        stage_sockets: StageSockets | None = None,
        expert_memory: RankMemory | None = None,
    ) -> None:
        """`memory`, `stage_sockets`, `expert_memory`: see `Worker`."""
        self.worker = worker = Worker(config, memory, stage_sockets, expert_memory)
        self.adapters: AdapterHost = worker.adapters
        self.drafts: DraftHost = worker.drafts
        self._thread: StepThread | None = None
        #: Of an engine that shares experts with others.
        self._lockstep: ExpertLockstep | None = None

    def load(self, progress: Callable[[int, int], None]) -> ModelFacts:
        return self.worker.load(progress)

    def determine_available_blocks(self) -> Capacity:
        return self.worker.determine_available_blocks()

    def allocate_cache(self) -> None:
        self.worker.allocate_cache()

    @property
    def kv_connector(self) -> KVConnectorBase | None:
        transfer = self.worker.kv_transfer
        return None if transfer is None else transfer.connector

    def on_serving(self) -> None:
        self.worker.on_serving()

    @property
    def supports_async_scheduling(self) -> bool:
        return self.worker.supports_async_scheduling

    @property
    def measures_prefill_pace(self) -> bool:
        return self.worker.measures_prefill_pace

    def read_numerics(self) -> Numerics | None:
        return self.worker.read_numerics()

    def attach(self, value: Any) -> int:
        return self.worker.attach(value)

    def detach(self, handle: int) -> None:
        self.worker.detach(handle)

    def send_bitmask(self, output: GrammarOutput) -> None:
        self.worker.send_bitmask(output)

    def execute(self, plan: StepPlan) -> StepResult:
        return self.worker.execute(plan)

    def apply_plan(self, plan: StepPlan) -> None:
        self.worker.prepare(plan)

    def execute_async(self, plan: StepPlan) -> StepFuture:
        """Prepare a step now and launch it in a thread, after those submitted before.

        On a device with its own queue, the thread launches a step while the previous one runs, and
        waiting for the result happens in the thread that asks for it.
        """
        if self._thread is None:
            self._thread = StepThread()
        worker = self.worker

        def prepare() -> Callable[[], PendingStep]:
            return partial(worker.launch, plan, worker.prepare(plan))

        return LaunchedStep(self._thread.submit(prepare))

    def resume(self) -> None:
        self.worker.reset()
        if self._thread is not None:
            self._thread.resume()

    @property
    def collective_s(self) -> float:
        return self.worker.collective_s

    @property
    def vllm_config(self) -> VllmConfig:
        return self.worker.vllm_config

    @property
    def is_sleeping(self) -> bool:
        return self.worker.is_sleeping

    def check_sleep(self) -> None:
        self.worker.check_sleep()
        if self._lockstep is not None:
            self._lockstep.refuse_sleep()

    def sleep(self, level: int) -> None:
        self.worker.sleep(level)

    def wake_up(self, tags: Collection[str]) -> None:
        self.worker.wake_up(tags)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        function = find_worker_method(method) if isinstance(method, str) else method
        return [function(self.worker, *args, **(kwargs or {}))]

    def check_health(self) -> None:
        if self._thread is not None and not self._thread.is_alive:
            raise EngineFault("The thread that runs steps has ended.")
        if self._lockstep is not None:
            self._lockstep.check()

    def shutdown(self) -> None:
        if self._lockstep is not None:
            self._lockstep.close()
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        self.worker.shutdown()
