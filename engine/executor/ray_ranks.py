"""Ranks as Ray actors: Ray places and stops them. Steps don't go through Ray."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from engine.contract.errors import ConfigError
from engine.executor.rank_process import JoinArguments, run_rank

_PARAM = "distributed_executor_backend"
#: Placement takes less unless the cluster has no CPUs for the ranks.
_PLACEMENT_TIMEOUT_S = 60.0


class RankActor:
    """The process of a rank."""

    def process_id(self) -> int:
        """Address of the machine on which Ray has placed it."""
        return os.getpid()

    def run(self, arguments: bytes) -> None:
        """Run the first rank's commands until it exits."""
        run_rank(msgspec.json.decode(arguments, type=JoinArguments))


class RayRank:
    """A rank that runs in an actor."""

    def __init__(self, ray: Any, group: Any, actor: Any, arguments: JoinArguments) -> None:
        """`group`: its placement group, which is removed with the first of its ranks."""
        self._ray, self._group, self._actor = ray, group, actor
        self.pid: int = ray.get(actor.process_id.remote())
        self._run = actor.run.remote(msgspec.json.encode(arguments))

    def poll(self) -> str:
        """How it has exited, as a message; "": it hasn't."""
        if not self._ray.wait([self._run], timeout=0)[0]:
            return ""
        try:
            self._ray.get(self._run)
        except self._ray.exceptions.RayError as error:
            return f"has ended in Ray: {str(error).strip().splitlines()[0]}"
        return "has ended"

    def kill(self) -> None:
        """Kill the actor's process."""
        self._ray.kill(self._actor)

    def on_closing(self) -> None:
        """Let Ray stop it: if it exited by itself, Ray would report a crash."""
        self.kill()

    def wait(self, timeout_s: float) -> None:
        """Let it exit by itself; kill it after `timeout_s`."""
        self._ray.wait([self._run], timeout=timeout_s)
        self._ray.util.remove_placement_group(self._group)


class RayRanks:
    """Places the ranks 1 to size - 1 by a placement group, with a bundle per stage: ranks of a
    stage share memory, and those of the first stage are on this machine.

    Raises `ConfigError` without Ray, or if the cluster has no CPUs for them.
    """

    def __init__(self, num_cpus: int) -> None:
        """`num_cpus`: of each rank."""
        try:
            import ray
        except ImportError as error:
            raise ConfigError(
                f"{_PARAM}=ray needs Ray: pip install 'quire[ray]'.", param=_PARAM
            ) from error
        self._ray, self._num_cpus = ray, num_cpus
        if not ray.is_initialized():
            ray.init(include_dashboard=False)
        #: Address at which other nodes reach this one.
        self.host: str = ray.util.get_node_ip_address()

    def start(self, arguments: JoinArguments) -> Sequence[RayRank]:
        """Have the ranks join with these `arguments`."""
        ray, size = self._ray, arguments.state.tensor_parallel_size
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundles = [
            {"CPU": float(self._num_cpus * size)}
            for _ in range(arguments.state.pipeline_parallel_size)
        ]
        bundles[0]["CPU"] -= self._num_cpus  # the first rank's CPUs belong to this process
        bundles[0][f"node:{self.host}"] = 0.001
        bundles = [{name: value for name, value in bundle.items() if value} for bundle in bundles]
        group = ray.util.placement_group(bundles, strategy="PACK")
        try:
            ray.get(group.ready(), timeout=_PLACEMENT_TIMEOUT_S)
        except ray.exceptions.GetTimeoutError as error:
            ray.util.remove_placement_group(group)
            total = sum(bundle.get("CPU", 0) for bundle in bundles)
            raise ConfigError(
                f"{_PARAM}=ray: the cluster has no {total:g} CPUs for the ranks; it has "
                f"{ray.available_resources().get('CPU', 0):g} free of "
                f"{ray.cluster_resources().get('CPU', 0):g}.",
                param=_PARAM,
            ) from error
        paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        actor = ray.remote(
            num_cpus=self._num_cpus,
            max_restarts=0,
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}},
        )(RankActor)
        states = [
            replace(arguments.state, rank=rank) for rank in range(1, arguments.state.world_size)
        ]
        return [
            RayRank(
                ray,
                group,
                actor.options(
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        placement_group=group, placement_group_bundle_index=state.stage
                    )
                ).remote(),
                msgspec.structs.replace(arguments, state=state),
            )
            for state in states
        ]
