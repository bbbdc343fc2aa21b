"""`ExternalExecutor`: one rank of a model, in a process started by a launcher such as torchrun.

Every rank has its own engine, and the same program requests the same outputs from each: their plans
are equal, because nothing that a plan depends on is measured.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec
import torch.distributed as dist

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError, EngineFault, PeerFault
from engine.devices.cpu import kernels_on
from engine.distributed.memory import RankMemory
from engine.distributed.parallel_state import DATA_PARAM, ParallelState
from engine.distributed.rendezvous import Rendezvous, stage_sockets
from engine.executor.abstract import Capacity, StepFuture
from engine.executor.expert_lockstep import ExpertLockstep
from engine.executor.rank_settings import check_ranks, rank_config, rank_memory_bytes
from engine.executor.ranked_step import RankedStep
from engine.executor.uniproc_executor import UniProcExecutor
from engine.scheduler.plan import StepPlan, StepResult
from kernels import KernelSet
from kernels.errors import RankError

_PARAM = "distributed_executor_backend"
#: Numbers the engines of a process, which all ranks create in the same order.
_groups = itertools.count()


class ExternalExecutor(UniProcExecutor):
    """Runs this process's worker; the engines of the other processes run the others.

    Raises `ConfigError` for settings that don't work with a launcher, or without a launcher.
    """

    def __init__(self, config: EngineConfig) -> None:
        check_ranks(config)
        if config.speculative_config and config.needs_equal_requests:
            raise ConfigError(
                "speculative_config can't be used with distributed_executor_backend="
                "external_launcher: whether drafts pay is measured, so ranks would differ.",
                param="speculative_config",
            )
        state = launched_state(config, os.environ)
        ops = kernels_on("cpu", config)
        store, _, _ = next(dist.rendezvous("env://"))
        number, host = next(_groups), os.environ["MASTER_ADDR"]
        index = int(os.environ["RANK"]) // state.world_size  # of this model
        self._rendezvous = meeting = Rendezvous(
            dist.PrefixStore(f"quire/{number}/{index}", store), state, host
        )
        expert_memory = None
        if config.shares_experts:
            peers = ParallelState(index, config.data_parallel_size)
            self._peers = Rendezvous(
                dist.PrefixStore(f"quire/{number}/experts", store), peers, host
            )
            expert_memory = share_expert_memory(self._peers, ops)
        memory = meeting.share_memory(rank_memory_bytes(config, ops))
        sockets = stage_sockets(state, meeting.connect())
        # Threads and CPUs are shared by the ranks of a model, or by the engines of a group.
        group = self._peers if config.shares_experts else meeting
        local_rank, size = group.local_ranks.index(group.state.rank), len(group.local_ranks)
        super().__init__(rank_config(config, local_rank, size, ops), memory, sockets, expert_memory)
        self._lockstep: ExpertLockstep | None = None
        if expert_memory is not None and self.worker.expert_ranks is not None:
            self._lockstep = ExpertLockstep(self.worker, self.worker.expert_ranks, expert_memory)
            self._lockstep.watch()
            self.worker.forward_scope = self._lockstep

    @property
    def measures_prefill_pace(self) -> bool:
        return False

    def determine_available_blocks(self) -> Capacity:
        """The first rank's value, for all ranks."""
        if self._rendezvous.state.rank == 0:
            capacity = super().determine_available_blocks()
            self._rendezvous.write("capacity", msgspec.json.encode(capacity).decode())
            return capacity
        capacity = msgspec.json.decode(self._rendezvous.read("capacity", 0), type=Capacity)
        self.worker.set_capacity(capacity)
        return capacity

    def allocate_cache(self) -> None:
        super().allocate_cache()
        if self._lockstep is not None:
            self._peers.wait_for_all("ready")
            self._lockstep.join()

    def execute(self, plan: StepPlan) -> StepResult:
        with self.explain_failure(plan.step):
            return super().execute(plan)

    def execute_async(self, plan: StepPlan) -> StepFuture:
        return RankedStep(self, plan.step, super().execute_async(plan))

    def finish(self, step: int, launched: StepFuture) -> StepFuture:
        """A launched step, whose tokens are sampled when its result is requested."""
        return launched

    @contextmanager
    def explain_failure(self, step: int) -> Iterator[None]:
        """Context that runs a step, or waits for it: after an error the engines would diverge.

        Raises `EngineFault`.
        """
        try:
            yield
        except Exception as error:
            self.worker.fail_ranks()
            if self._lockstep is not None:
                self._lockstep.check()
            group = self.worker.ranks or self.worker.expert_ranks
            missing = None if group is None else group.missing_rank
            who = f"Rank {self.worker.rank}" if missing is None else f"Rank {missing}"
            lockstep = self._lockstep
            is_peers = lockstep is not None and not lockstep.is_late
            kind = PeerFault if is_peers and isinstance(error, RankError) else EngineFault
            raise kind(f"{who} failed in step {step}: {error}") from error

    def resume(self) -> None:
        self.check_health()
        raise EngineFault("A step failed, and ranks of a launcher can't begin anew.")

    def check_health(self) -> None:
        super().check_health()
        if self._lockstep is not None:
            self._lockstep.check()

    def check_sleep(self) -> None:
        super().check_sleep()
        if self._lockstep is not None:
            raise ConfigError(
                f"enable_sleep_mode can't be used where {DATA_PARAM} shares experts: other engines "
                "need those of this one.",
                param="enable_sleep_mode",
            )

    def shutdown(self) -> None:
        if self._lockstep is not None:
            self._lockstep.close()
        super().shutdown()
        self.worker.close_connections()


def share_expert_memory(peers: Rendezvous, ops: KernelSet) -> RankMemory:
    """The memory of engines that share experts. Raises `ConfigError` unless all are on one machine,
    with the compiled kernels.
    """
    size = peers.state.tensor_parallel_size
    if len(peers.local_ranks) < size:
        raise ConfigError(
            f"{DATA_PARAM}={size} with enable_expert_parallel can't be used on several machines: "
            "engines share experts through memory. Run replicas with all experts on each.",
            param=DATA_PARAM,
        )
    num_bytes = ops.rank_memory_bytes(size)
    if not num_bytes:
        raise ConfigError(
            f"{DATA_PARAM}={size} with enable_expert_parallel needs the compiled CPU kernels; "
            f"{ops.name} runs here: {ops.why}.",
            param=DATA_PARAM,
        )
    return peers.share_memory(num_bytes)


def launched_state(config: EngineConfig, environ: Mapping[str, str]) -> ParallelState:
    """This process's rank in its model, from the launcher's variables.

    Of WORLD_SIZE processes, each `world_size` share a model; several models mean data parallelism.
    Raises `ConfigError`.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if not environ.get(name)]:
        raise ConfigError(
            f"{_PARAM}=external_launcher needs the variables that torchrun sets; "
            f"{', '.join(missing)} isn't set.",
            param=_PARAM,
        )
    size, num_processes = config.world_size, int(environ["WORLD_SIZE"])
    num_models = config.data_parallel_size
    if num_models > 1 and num_processes != size * num_models:
        raise ConfigError(
            f"The launcher's number of processes must be that of all ranks, {size * num_models}; "
            f"got {num_processes}.",
            param=DATA_PARAM,
        )
    if num_processes % size:
        raise ConfigError(
            f"The launcher's number of processes must be a multiple of tensor_parallel_size * "
            f"pipeline_parallel_size, {size}; got {num_processes}.",
            param="tensor_parallel_size",
        )
    return ParallelState(
        int(environ["RANK"]) % size, config.tensor_parallel_size, config.pipeline_parallel_size
    )
