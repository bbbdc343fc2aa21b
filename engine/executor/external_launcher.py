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
from engine.contract.errors import ConfigError, EngineFault
from engine.devices.cpu import kernels_on
from engine.distributed.parallel_state import DATA_PARAM, ParallelState
from engine.distributed.rendezvous import Rendezvous, stage_sockets
from engine.executor.abstract import Capacity, StepFuture
from engine.executor.expert_peers import ExpertPeers, check_launcher
from engine.executor.rank_settings import check_ranks, rank_config, rank_memory_bytes
from engine.executor.ranked_step import RankedStep
from engine.executor.uniproc_executor import UniProcExecutor
from engine.scheduler.plan import StepPlan, StepResult

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
        memory = meeting.share_memory(rank_memory_bytes(config, ops))
        sockets = stage_sockets(state, meeting.connect())
        self._peers = peers = ExpertPeers(config, ops) if config.shares_experts else None
        # Threads and CPUs are shared by the ranks of a model, or by the engines of a group.
        if peers is not None:
            settings = peers.rank_config(config, 0, ops)
        else:
            local_rank, size = meeting.local_ranks.index(state.rank), len(meeting.local_ranks)
            settings = rank_config(config, local_rank, size, ops)
        super().__init__(settings, memory, sockets, None if peers is None else peers.memory)
        if peers is not None:
            self._lockstep = peers.keep_step(self.worker, self.worker.join_forward)

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
        if self._peers is not None and self._lockstep is not None:
            self._peers.rendezvous.wait_for_all("ready")
            self._lockstep.join()

    def execute(self, plan: StepPlan) -> StepResult:
        with self.explain_failure(plan.step):
            if self._lockstep is not None:
                self._lockstep.begin_step()
            return super().execute(plan)

    def execute_async(self, plan: StepPlan) -> StepFuture:
        if self._lockstep is not None and plan.seq_ids:
            self._lockstep.begin_step()
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
            group = self.worker.ranks or self.worker.expert_ranks
            missing = None if group is None else group.missing_rank
            who = f"Rank {self.worker.rank}" if missing is None else f"Rank {missing}"
            reason = f"{who} failed in step {step}: {error}"
            if self._lockstep is not None:
                self._lockstep.end_by(error, reason)
            raise EngineFault(reason) from error

    def resume(self) -> None:
        self.check_health()
        raise EngineFault("A step failed, and ranks of a launcher can't begin anew.")

    def shutdown(self) -> None:
        super().shutdown()
        self.worker.close_connections()


def launched_state(config: EngineConfig, environ: Mapping[str, str]) -> ParallelState:
    """This process's rank in its model, from the launcher's variables.

    Of WORLD_SIZE processes, each `world_size` share a model; several models mean data parallelism.
    Raises `ConfigError`.
    """
    check_launcher(environ)
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
