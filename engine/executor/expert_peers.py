"""`ExpertPeers`: the engines that share experts with this one, as a launcher started them.

Each is a process, whose model may have several ranks in processes that it starts itself.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch.distributed as dist

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.distributed.parallel_state import DATA_PARAM, ParallelState
from engine.distributed.rendezvous import Rendezvous
from engine.executor.expert_lockstep import ExpertLockstep
from engine.executor.rank_settings import rank_config
from engine.executor.worker import Worker
from kernels import KernelSet

#: Numbers the engines of a process, which all processes create in the same order.
_groups = itertools.count()


class ExpertPeers:
    """This engine's place among those that share experts.

    Attributes:
        rendezvous: of the engines.
        memory: shared by all engines' ranks; its state is that of this engine's first one.

    Raises `ConfigError` unless all are on one machine, with the compiled kernels.
    """

    def __init__(self, config: EngineConfig, ops: KernelSet) -> None:
        index = launched_rank(config, os.environ)
        store, _, _ = next(dist.rendezvous("env://"))
        prefix = dist.PrefixStore(f"quire/{next(_groups)}/experts", store)
        num_engines = config.data_parallel_size
        self.rendezvous = peers = Rendezvous(
            prefix, ParallelState(index, num_engines), os.environ["MASTER_ADDR"]
        )
        if len(peers.local_ranks) < num_engines:
            raise ConfigError(
                f"{DATA_PARAM}={num_engines} with enable_expert_parallel can't be used on several "
                "machines: engines share experts through memory. Run replicas with all experts on "
                "each.",
                param=DATA_PARAM,
            )
        self._num_ranks = config.tensor_parallel_size
        state = ParallelState(index * self._num_ranks, num_engines * self._num_ranks)
        num_bytes = ops.rank_memory_bytes(state.world_size)
        if not num_bytes:
            raise ConfigError(
                f"{DATA_PARAM}={num_engines} with enable_expert_parallel needs the compiled CPU "
                f"kernels; {ops.name} runs here: {ops.why}.",
                param=DATA_PARAM,
            )
        self.memory = replace(peers.share_memory(num_bytes), state=state)

    def rank_config(self, config: EngineConfig, rank: int, ops: KernelSet) -> EngineConfig:
        """The settings of a rank of this engine: engines share threads and CPUs.

        Raises `ConfigError` if there are fewer CPUs than ranks.
        """
        state = self.memory.state
        return rank_config(config, state.rank + rank, state.world_size, ops)

    def keep_step(self, worker: Worker, join_pass: Callable[[], None]) -> ExpertLockstep:
        """Have the first rank's worker compute in step with the others. `join_pass`: has this
        engine take part in a forward pass of others.

        Raises `ConfigError` if the worker isn't in the group.
        """
        if worker.expert_ranks is None:
            raise ConfigError(f"{DATA_PARAM}: the worker shares no experts.", param=DATA_PARAM)
        lockstep = ExpertLockstep(join_pass, worker.expert_ranks, self.memory, self._num_ranks)
        lockstep.watch()
        worker.forward_scope = lockstep
        return lockstep


def check_launcher(environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` unless a launcher has started this process."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if not environ.get(name)]:
        param = "distributed_executor_backend"
        raise ConfigError(
            f"{param}=external_launcher needs the variables that torchrun sets; "
            f"{', '.join(missing)} isn't set.",
            param=param,
        )


def launched_rank(config: EngineConfig, environ: Mapping[str, str]) -> int:
    """This engine's number among those that share experts. Raises `ConfigError`."""
    check_launcher(environ)
    if int(environ["WORLD_SIZE"]) != config.data_parallel_size:
        raise ConfigError(
            f"The launcher's number of processes must be {config.data_parallel_size}, one per "
            f"engine that shares experts; got {environ['WORLD_SIZE']}.",
            param=DATA_PARAM,
        )
    return int(environ["RANK"])
