"""Which threads compute, and on which CPUs.

The kernels have one pool of threads; torch's own is left a single one where the kernels do all of
the work, because its idle threads spin and would take the cores that the kernels need.
"""

from __future__ import annotations

import atexit
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.system.host import num_usable_cpus
from kernels import KernelSet

#: Longer than a step or a piece of memory takes on any machine; an endless one isn't waited for.
_WAIT_S = 10.0

_running: dict[threading.Thread, Callable[[], object]] = {}


class JoinedThread(threading.Thread):
    """A daemon thread that the interpreter tells to end, and waits for, as it exits.

    The interpreter ends daemon threads as soon as they ask for its lock. Inside a torch operator
    that aborts the process: C++ can't unwind through a destructor that was taking the lock again.
    """

    def __init__(
        self, run: Callable[..., None], *args: Any, name: str, tell_end: Callable[[], object]
    ) -> None:
        """`run(*args)` returns soon after `tell_end()` was called."""
        super().__init__(target=run, args=args, name=name, daemon=True)
        self._tell_end = tell_end

    def run(self) -> None:
        """See `threading.Thread`."""
        _running[self] = self._tell_end
        try:
            super().run()
        finally:
            del _running[self]


@atexit.register
def _join_all() -> None:
    for thread, tell_end in list(_running.items()):
        tell_end()
        thread.join(_WAIT_S)


_initial_count: int | None = None
"""torch's threads before the first engine of this process set them."""
_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


@dataclass(frozen=True, slots=True)
class Threads:
    """The engine's threads.

    Attributes:
        count: of them.
        cpus: one CPU for each, the step's own thread first; (): wherever the system puts them.
        bind_across: without `cpus`, keep the pool's threads on CPUs of their own where there are
        enough.
    """

    count: int
    cpus: tuple[int, ...] = ()
    bind_across: bool = True

    @classmethod
    def from_config(cls, config: EngineConfig, ops: KernelSet) -> Threads:
        """The threads according to the settings. Raises `ConfigError` for invalid CPUs."""
        binding = config.cpu_threads_bind
        if binding in ("auto", "nobind"):
            return cls(config.num_threads or default_num_threads(ops), (), binding == "auto")
        cpus = parse_cpus(binding)
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(cpus)
        if not allowed.issuperset(cpus):
            raise ConfigError(
                f"cpu_threads_bind: this process may not run on all of {binding!r}, "
                f"only on {sorted(allowed)}.",
                param="cpu_threads_bind",
            )
        count = config.num_threads or len(cpus)
        if count > len(cpus):
            raise ConfigError(
                f"num_threads ({count}) is more than the {len(cpus)} CPUs of cpu_threads_bind.",
                param="num_threads",
            )
        return cls(count, cpus)

    def use(self, ops: KernelSet, *, torch_too: bool = False) -> None:
        """Compute with these from now on; to be called in the thread that runs steps.

        Args:
            torch_too: a part of the work is torch's, which gets as many threads.
        """
        global _initial_count
        if _initial_count is None:
            _initial_count = torch.get_num_threads()
        ops.use_threads(self.count, self.cpus or None, spread=self.bind_across)
        if torch_too:
            torch.set_num_threads(self.count)


def default_num_threads(ops: KernelSet) -> int:
    """As many as torch took before an engine set them, within a container's CPU quota."""
    return num_usable_cpus(_initial_count or ops.num_threads())


def parse_cpus(text: str) -> tuple[int, ...]:
    """CPUs of a list such as "0-3,8". Raises `ConfigError` for anything else."""
    cpus: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ConfigError(
                f'cpu_threads_bind must be "auto", "nobind" or CPUs such as "0-3,8"; got {text!r}.',
                param="cpu_threads_bind",
            )
        first, last = int(match[1]), int(match[2] or match[1])
        cpus += range(first, last + 1)
    if len(set(cpus)) != len(cpus) or not cpus:
        raise ConfigError(
            f"cpu_threads_bind: {text!r} names no CPU, or one twice.", param="cpu_threads_bind"
        )
    return tuple(cpus)
