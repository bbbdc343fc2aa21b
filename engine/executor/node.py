"""`python -m engine.executor.node`: the ranks of a machine that doesn't run the first rank.

Its argument is settings as JSON, of which those about ranks matter: the first rank sends the rest.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from dataclasses import replace

import msgspec

from engine.contract.engine_config import EngineConfig
from engine.distributed.parallel_state import ParallelState
from engine.executor.rank_process import JoinArguments
from engine.executor.rank_processes import LocalRank, RankHandle
from engine.executor.remote_ranks import NodeRank

log = logging.getLogger(__name__)

#: Delay before it looks for the first rank's engine again.
_RETRY_S = 1.0


def node_ranks(config: EngineConfig, node_rank: int) -> range:
    """The ranks of a node: nodes have equal numbers of ranks, in order."""
    size = config.world_size // config.nnodes
    return range(node_rank * size, (node_rank + 1) * size)


def start_node_ranks(config: EngineConfig, arguments: JoinArguments) -> list[RankHandle]:
    """Start the other ranks on the first one's node; those of other nodes connect by themselves."""
    local = node_ranks(config, 0)
    return [
        start_rank(arguments, rank) if rank in local else NodeRank()
        for rank in range(1, config.world_size)
    ]


def start_rank(arguments: JoinArguments, rank: int) -> LocalRank:
    """A process on this machine, which joins with `arguments`. Raises OSError."""
    return LocalRank(msgspec.structs.replace(arguments, state=replace(arguments.state, rank=rank)))


def run_node(config: EngineConfig) -> None:
    """Run this node's ranks until SIGTERM or SIGINT. When they exit, with the first rank's engine,
    they wait for the next engine.
    """
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    state = ParallelState(0, config.tensor_parallel_size, config.pipeline_parallel_size)
    arguments = JoinArguments(config.master_addr, config.master_port, state)
    while not stopped.is_set():
        ranks = [start_rank(arguments, rank) for rank in node_ranks(config, config.node_rank)]
        while not stopped.wait(_RETRY_S) and not any(rank.poll() for rank in ranks):
            pass
        for rank in ranks:
            if reason := rank.poll():
                log.info("A rank of this node %s.", reason)
            rank.kill()
            rank.wait(_RETRY_S)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    run_node(EngineConfig.from_mapping(msgspec.json.decode(sys.argv[1])))
