"""A bounded cache in front of an expensive look-up, for one process."""

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class AsyncTTLCache(Generic[K, V]):
    """LRU cache: results are kept for `ttl` seconds, at most `size` of them.

    Concurrent misses share one look-up. A hit that is older than half the TTL starts a refresh in
    the background, so frequent callers never wait. `clear` may be called from another thread.

    Attributes:
        generation: number of times that the cache was cleared.
    """

    def __init__(
        self, *, ttl: float, size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.ttl, self.size, self._clock = ttl, size, clock
        self._answers: OrderedDict[K, tuple[float, V]] = OrderedDict()
        self._flying: dict[K, asyncio.Task[V]] = {}
        self.generation = 0

    def __len__(self) -> int:
        return len(self._answers)

    def clear(self) -> None:
        """Drop every result, including those of look-ups in progress."""
        self.generation += 1
        self._answers.clear()
        self._flying.clear()

    def peek(self, key: K) -> V | None:
        """Return the cached result if it is younger than the TTL, else None."""
        return self.get_if_younger(key, self.ttl)

    def get_if_younger(self, key: K, seconds: float) -> V | None:
        """Return the cached result if it is at most `seconds` old, else None."""
        answer = self._answers.get(key)
        if answer is None or self._clock() - answer[0] > seconds:
            return None
        with contextlib.suppress(KeyError):  # another thread cleared the cache
            self._answers.move_to_end(key)
        return answer[1]

    def get_cached(self, key: K, look_up: Callable[[], Awaitable[V]]) -> V | None:
        """The cached result if it is younger than the TTL, else None.

        Past half its age it is refreshed in the background, without reporting errors.
        """
        answer = self.peek(key)
        if answer is not None and self.get_if_younger(key, self.ttl / 2) is None:
            self._load(key, look_up)
        return answer

    async def get(self, key: K, look_up: Callable[[], Awaitable[V]]) -> V:
        """The result from the cache or from `look_up`, whose exceptions reach every caller."""
        answer = self.get_cached(key, look_up)
        if answer is not None:
            return answer
        # Shielded: one caller's cancellation must not fail the others.
        return await asyncio.shield(self._load(key, look_up))

    def store(self, key: K, answer: V, generation: int | None = None) -> None:
        """Store a result as of now, unless it was looked up in an older `generation`."""
        if generation is not None and generation != self.generation:
            return
        self._answers.pop(key, None)
        self._answers[key] = (self._clock(), answer)
        while len(self._answers) > self.size:
            self._answers.popitem(last=False)

    def forget(self, key: K) -> None:
        """Drop one result."""
        self._answers.pop(key, None)

    def _load(self, key: K, look_up: Callable[[], Awaitable[V]]) -> "asyncio.Task[V]":
        task = self._flying.get(key)
        loop = asyncio.get_running_loop()
        if task is None or task.done() or task.get_loop() is not loop:
            task = loop.create_task(self._run(key, look_up, self.generation))
            self._flying[key] = task
            task.add_done_callback(lambda done: self._on_loaded(key, done))
        return task

    async def _run(self, key: K, look_up: Callable[[], Awaitable[V]], generation: int) -> V:
        answer = await look_up()
        self.store(key, answer, generation)
        return answer

    def _on_loaded(self, key: K, task: "asyncio.Task[V]") -> None:
        if self._flying.get(key) is task:
            self._flying.pop(key, None)
        if not task.cancelled():
            task.exception()  # mark it as retrieved: all callers may have left
