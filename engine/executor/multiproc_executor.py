"""`MultiprocExecutor`: a model shared by several processes.

The first rank's worker is in this process; its results are the executor's. The other ranks run the
same plans: all have bitwise equal logits, and so sample the same tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError, EngineFault, InvalidRequest
from engine.contract.lora import AdapterRef
from engine.devices.cpu import kernels_on
from engine.distributed.channel import ChannelClosed
from engine.distributed.memory import RankMemory
from engine.distributed.parallel_state import PIPELINE_PARAM, ParallelState
from engine.executor.abstract import Capacity, Executor, StepFuture
from engine.executor.draft_worker import DraftWorkers
from engine.executor.expert_peers import ExpertPeers
from engine.executor.external_launcher import ExternalExecutor
from engine.executor.lora_worker import LoraWorker
from engine.executor.node import start_node_ranks
from engine.executor.rank_process import PackedTensor, RemoteCall, StagedAdapter
from engine.executor.rank_processes import RankProcesses
from engine.executor.rank_settings import check_ranks, rank_config, rank_memory_bytes
from engine.executor.ranked_step import RankedStep
from engine.executor.ray_ranks import RayRanks
from engine.executor.remote_ranks import RemoteRanks
from engine.executor.uniproc_executor import UniProcExecutor, find_worker_method
from engine.kv_transfer.offloading_connector import OffloadingConnector
from engine.kv_transfer.ranked_storage import RankedStorage
from engine.lora.store import AdapterFacts
from engine.models.interface import ModelFacts
from engine.models.sharding import PARAM
from engine.multimodal.inputs import encode_tensors
from engine.scheduler.plan import GrammarOutput, StepPlan, StepResult
from engine.speculative.interface import DraftFacts, DraftHost, HeadFacts, HeadPlan, HeadResult
from kernels import KernelSet
from kernels.errors import RankError, RankTimeout
from kernels.interface import RankGroup


class _FailureScope:
    """Context of a step: on failure no rank waits for the others, and the error names the rank."""

    def __init__(self, executor: MultiprocExecutor, step: int) -> None:
        self._executor, self._step = executor, step

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._executor.record_completed(self._step)
        else:
            self._executor.raise_failure(self._step, error)


class RankedAdapters:
    """The adapters of a model that ranks share; see `AdapterHost`.

    Ranks read them while steps run. They are published in the order of plans, so that all ranks can
    use them from the same step on.
    """

    def __init__(self, local: LoraWorker, ranks: RankProcesses) -> None:
        self._local, self._ranks = local, ranks
        self._numbers = itertools.count()

    @property
    def refusal(self) -> str:
        return self._local.refusal

    @property
    def num_bytes(self) -> int:
        return self._local.num_bytes

    @property
    def max_adapters(self) -> int | None:
        return self._local.max_adapters

    def load(self, ref: AdapterRef) -> AdapterFacts:
        facts, number = self._local.load(ref), next(self._numbers)
        try:
            self._ranks.stage_adapter(StagedAdapter(number, ref))
            self._ranks.broadcast("publish_adapter", number)
        except BaseException:
            self._local.unload(ref.digest)
            self._ranks.broadcast("discard_adapter", number)
            raise
        return facts

    def unload(self, digest: str) -> None:
        self._ranks.broadcast("unload_adapter", digest)
        self._local.unload(digest)

    def drop_host_copy(self, digest: str) -> None:
        self._ranks.broadcast("drop_host_copy", digest)
        self._local.drop_host_copy(digest)

    def has_host_copy(self, digest: str) -> bool:
        return self._local.has_host_copy(digest)


class RankedDrafts:
    """The drafts of a model that ranks share; see `DraftHost`.

    Only the first rank has a draft model, because plans contain the drafts' tokens. Heads run on
    all ranks: they use the model's embedding and output layer, of which each rank has a part.
    """

    def __init__(self, local: DraftWorkers, ranks: RankProcesses) -> None:
        self._local, self._ranks = local, ranks

    @property
    def model(self) -> DraftFacts | None:
        return self._local.model

    @property
    def heads(self) -> HeadFacts | None:
        return self._local.heads

    def execute(self, plan: StepPlan) -> StepResult:
        return self._local.execute(plan)

    def propose(self, plan: HeadPlan) -> HeadResult:
        self._ranks.broadcast("propose", plan)
        return self._local.propose(plan)


class MultiprocExecutor(UniProcExecutor):
    """Runs one worker in this process and the others in separate processes.

    Raises `ConfigError` for settings that don't work with several ranks.
    """

    def __init__(self, config: EngineConfig) -> None:
        check_ranks(config)
        ops = kernels_on("cpu", config)
        num_bytes = rank_memory_bytes(config, ops)
        size = config.tensor_parallel_size
        self._completed = -1
        self._finishers = ThreadPoolExecutor(1, "stage-finish")
        state = ParallelState(0, size, config.pipeline_parallel_size)
        param = PARAM if size > 1 else PIPELINE_PARAM
        self._peers = peers = ExpertPeers(config, ops) if config.shares_experts else None
        expert_memory = None if peers is None else peers.memory
        try:
            self._ranks = start_ranks(config, state, num_bytes, ops, expert_memory)
        except OSError as error:
            raise ConfigError(
                f"{param}={state.world_size}: no process can be started: {error}", param=param
            ) from error
        try:
            settings = [
                rank_config(config, rank % config.ranks_per_node, config.ranks_per_node, ops)
                if peers is None
                else peers.rank_config(config, rank, ops)
                for rank in range(state.world_size)
            ]
            self._ranks.start([other.to_mapping() for other in settings[1:]])
            super().__init__(
                settings[0], self._ranks.memory, self._ranks.stage_sockets, expert_memory
            )
            self._ranks.watch.groups = self._groups = self._join_groups(ops)
            if peers is not None:
                self._lockstep = peers.keep_step(self.worker, self._join_pass)
            self.adapters = RankedAdapters(self.worker.adapters, self._ranks)
            self.drafts: DraftHost = RankedDrafts(self.worker.drafts, self._ranks)
            self._ranks.collect("start", None)
        except BaseException:
            self._ranks.close()
            raise

    def _join_groups(self, ops: KernelSet) -> list[RankGroup]:
        """The group of this rank's stage, then those of the other stages."""
        if self.worker.ranks is None:
            return []
        memory = self._ranks.memory
        size = memory.state.tensor_parallel_size
        stages = {rank // size for rank in self._ranks.local_ranks} - {0}
        experts = [] if self.worker.expert_ranks is None else [self.worker.expert_ranks]
        return [self.worker.ranks, *(memory.join(ops, stage) for stage in sorted(stages)), *experts]

    def _join_pass(self) -> None:
        """Take part in a forward pass of engines that share experts with this one."""
        self._ranks.broadcast("join_forward")
        self.worker.join_forward()

    @property
    def process_ids(self) -> list[int]:
        """Ids of the processes of ranks 1 and higher."""
        return self._ranks.process_ids

    def load(self, progress: Callable[[int, int], None]) -> ModelFacts:
        try:
            self._ranks.broadcast("load")
            facts = super().load(progress)
            if self.drafts.heads is not None and self.worker.stage is not None:
                raise ConfigError(
                    "speculative_config: drafts by heads can't be used with "
                    f"{PIPELINE_PARAM}. Use a draft model or ngram, or leave it out.",
                    param="speculative_config",
                )
            # No timeout, however slow a disk is: ranks are watched.
            self._ranks.collect("load", None)
            self._ranks.watch.loads = False
        except BaseException:
            self._ranks.close()
            raise
        return facts

    def determine_available_blocks(self) -> Capacity:
        capacity = super().determine_available_blocks()
        self._ranks.broadcast("set_capacity", capacity)
        self._ranks.collect("set_capacity")
        return capacity

    def allocate_cache(self) -> None:
        self._ranks.broadcast("allocate_cache")
        super().allocate_cache()
        self._ranks.collect("allocate_cache")
        connector = self.kv_connector
        storage = connector.storage if isinstance(connector, OffloadingConnector) else None
        if isinstance(storage, RankedStorage):
            storage.connect(self._ranks.part_channels)
        if self._peers is not None and self._lockstep is not None:
            self._peers.rendezvous.wait_for_all("ready")
            self._lockstep.join()

    def on_serving(self) -> None:
        self._ranks.broadcast("on_serving")
        super().on_serving()

    def attach(self, value: Any) -> int:
        if isinstance(value, Tensor):
            data = value.numpy().tobytes()
            self._ranks.broadcast("attach", PackedTensor(value.shape[-1], data))
        elif isinstance(value, Mapping):
            self._ranks.broadcast("attach_media", encode_tensors(value))
        else:
            raise InvalidRequest(
                "logits_processors are functions, which can't reach the other ranks of this model.",
                param="logits_processors",
            )
        return super().attach(value)

    def detach(self, handle: int) -> None:
        self._ranks.broadcast("detach", handle)
        super().detach(handle)

    def send_bitmask(self, output: GrammarOutput) -> None:
        # First on this rank: its steps wait for it, whatever happens to the others.
        super().send_bitmask(output)
        self._ranks.broadcast("send_bitmask", output)

    def execute(self, plan: StepPlan) -> StepResult:
        if self._lockstep is not None:
            self._lockstep.begin_step()
        self._ranks.broadcast("execute", plan)
        with self.explain_failure(plan.step):
            return super().execute(plan)

    def apply_plan(self, plan: StepPlan) -> None:
        self._ranks.broadcast("apply_plan", plan)
        super().apply_plan(plan)

    def execute_async(self, plan: StepPlan) -> StepFuture:
        if self._lockstep is not None and plan.seq_ids:
            self._lockstep.begin_step()
        self._ranks.broadcast("launch", plan)
        return RankedStep(self, plan.step, super().execute_async(plan))

    def finish(self, step: int, launched: StepFuture) -> StepFuture:
        """Sample the tokens of a launched step, if that isn't part of the launch."""
        if self.worker.stage is None:
            return launched
        self._ranks.broadcast("finish", step)
        # In a thread: an interrupt would leave the logits half read.
        return self._finishers.submit(launched.result)

    def explain_failure(self, step: int) -> _FailureScope:
        """Context that runs a step, or waits for it."""
        return _FailureScope(self, step)

    def record_completed(self, step: int) -> None:
        """Record that a step has run on this rank."""
        self._completed = max(self._completed, step)

    def raise_failure(self, step: int, error: BaseException) -> None:
        """Handle a failed step: no rank waits any more. Raises `EngineFault` for a lost rank."""
        self.worker.fail_ranks()
        if self._ranks.watch.failure:
            raise EngineFault(f"{self._ranks.watch.failure} It was in step {step}.") from error
        reason = ""
        if isinstance(error, RankTimeout):
            reason = f"{error} It was to be of step {step}."
        elif isinstance(error, RankError | ChannelClosed):
            group = self.worker.ranks
            if group is not None and (missing := group.missing_rank) is not None:
                gather = f"gather {group.num_gathers} of step {step}"
                reason = f"Rank {missing} did not come to {gather} in time."
        if reason:
            self._ranks.watch.fail(reason)
            raise EngineFault(self._ranks.watch.failure) from error
        if self._lockstep is not None and isinstance(error, Exception):
            self._lockstep.end_by(error, f"Step {step} failed: {error}")

    def resume(self) -> None:
        self.check_health()
        if self._lockstep is not None:
            raise EngineFault("A step failed, and engines that share experts can't begin anew.")
        self._ranks.broadcast("reset")
        replies = self._ranks.collect("reset")
        for rank, reply in enumerate(replies, 1):
            if failed := [step for step in reply.failed_steps if step <= self._completed]:
                self._ranks.watch.fail(f"Rank {rank} failed in step {failed[0]}, which others ran.")
                raise EngineFault(self._ranks.watch.failure)
        super().resume()
        self.worker.reset_ranks()
        for group in self._groups:
            group.forget_failure()
        self._ranks.memory.set_failed(False)
        self._ranks.finish_reset()

    def sleep(self, level: int) -> None:
        self._ranks.broadcast("sleep", level)
        try:
            super().sleep(level)
        finally:
            self._ranks.collect("sleep")

    def wake_up(self, tags: Collection[str]) -> None:
        self._ranks.broadcast("wake_up", list(tags))
        try:
            super().wake_up(tags)
        finally:
            self._ranks.collect("wake_up")

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        if not isinstance(method, str):
            raise InvalidRequest(
                "A function can't reach the other ranks of this model: name a method of workers.",
                param="method",
            )
        find_worker_method(method)
        call = RemoteCall(method, list(args), dict(kwargs or {}))
        self._ranks.broadcast("collective_rpc", call)
        try:
            results = super().collective_rpc(method, args, kwargs)
        finally:
            replies = self._ranks.collect("collective_rpc")
        return [*results, *(reply.result for reply in replies)]

    def check_health(self) -> None:
        if self._ranks.watch.failure:
            raise EngineFault(self._ranks.watch.failure)
        super().check_health()

    def shutdown(self) -> None:
        super().shutdown()
        self._ranks.close()
        self.worker.close_connections()
        self._finishers.shutdown()


def start_ranks(
    config: EngineConfig,
    state: ParallelState,
    num_bytes: int,
    ops: KernelSet,
    expert_memory: RankMemory | None = None,
) -> RankProcesses:
    """Start the other ranks with the launcher that the settings name.

    Raises `ConfigError`, and OSError if the system refuses to.
    """
    if config.distributed_executor_backend == "ray":
        num_cpus = rank_config(config, 0, config.ranks_per_node, ops).num_threads or 1
        ray = RayRanks(num_cpus)
        return RemoteRanks(state, num_bytes, ray.host, 0, ray.start)
    if config.nnodes > 1:
        return RemoteRanks(
            state,
            num_bytes,
            config.master_addr,
            config.master_port,
            lambda arguments: start_node_ranks(config, arguments),
        )
    return RankProcesses(state, num_bytes, expert_memory)


def make_executor(config: EngineConfig) -> Executor:
    """Create the executor for these settings.

    Raises `ConfigError` for a device that isn't available.
    """
    launched = config.distributed_executor_backend == "external_launcher"
    if launched and not (config.shares_experts and config.world_size > 1):
        return ExternalExecutor(config)
    if config.world_size > 1 or config.distributed_executor_backend == "ray":
        return MultiprocExecutor(config)
    return UniProcExecutor(config)
