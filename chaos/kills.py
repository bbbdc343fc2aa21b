"""Kills replicas at random moments under streams of every kind, whose content must not change."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from chaos.client import Client
from chaos.instance import Instance, command_line, holds
from chaos.kinds import KINDS, STREAM
from chaos.run import RECOVERY_TIMEOUT_S, Run, Schedule, Window
from engine.contract.messages import Heartbeat

#: Mean seconds between two kills; intervals are random, and some are very short.
MEAN_S = 2.0
FAULT = "replica killed"
STREAMED = [name for name, kind in KINDS.items() if kind.how == STREAM]


class Kills(Run):
    """Kills ready replicas a number of times under a number of streams, half of them greedy.

    Args:
        max_tokens: of a stream. Streams that end before the last kill are repeated.
    """

    def __init__(
        self, kills: int, streams: int, max_tokens: int, seed: int,
        log_line: Callable[[str], None], log: Path | None = None,
    ) -> None:  # fmt: skip
        super().__init__(seed, log_line, log)
        self._kills, self._streams, self.max_tokens = kills, streams, max_tokens

    def _turns(self) -> list[Schedule]:
        kinds = itertools.cycle(STREAMED)
        turns = []
        for number, kind in zip(range(self._streams), kinds, strict=False):
            turns.append([(kind, number // len(STREAMED) * 2 + number % 2)])
        return turns

    async def _harm(self, instance: Instance, client: Client) -> None:
        """Kill replicas without waiting for the instance to recover in between."""
        rng = random.Random(self._seed)
        while len(self._outcome.windows) < self._kills:
            await asyncio.sleep(rng.expovariate(1 / MEAN_S))
            await holds(lambda: bool(_victims(instance)), RECOVERY_TIMEOUT_S, every_s=0.02)
            victims = await asyncio.to_thread(_victims, instance)
            busy = [beat for beat in victims if beat.stats.num_requests_running]
            if victims and _kill((victim := rng.choice(busy or victims)).pid):
                now, running = time.monotonic(), victim.stats.num_requests_running
                self._outcome.windows.append(Window(FAULT, now, now, running, len(self._open)))
                self._log_line(
                    f"kill {len(self._outcome.windows)}, which told of {running} sequences, "
                    f"beside {len(self._open)} streams"
                )

    async def _compare(self, instance: Instance, previous_ids: set[str]) -> None:
        await super()._compare(instance, previous_ids)
        if not any(window.running or window.open for window in self._outcome.windows):
            self._problem("no replica had anything to do when it was killed")
        broken = sum(request.answer.breaks for request in self._outcome.requests)
        if broken:
            self._problem(f"{broken} connections broke, though no gateway was harmed")


def _victims(instance: Instance) -> list[Heartbeat]:
    """Return replicas that may be killed: none unless another one serves or loads, since a replica
    that hasn't begun to load may take longer than streams wait.
    """
    mine = [beat for beat in instance.heartbeats() if beat.model.name == instance.model]
    alive = [beat for beat in mine if command_line(beat.pid)]
    return [beat for beat in alive if beat.state == "ready"] if len(alive) > 1 else []


def _kill(pid: int) -> bool:
    """Return whether the process existed: its heartbeat remains for a while after its death."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
