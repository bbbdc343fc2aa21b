"""Rendering off the event loop: short prompts in place, long ones in a few threads, all in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import ParamSpec, TypeVar

from engine.contract.errors import InvalidRequest
from inference.errors import Overloaded
from inference.settings import gateway_settings

P = ParamSpec("P")
T = TypeVar("T")

#: Jobs that may wait for each thread; more are refused.
QUEUED_PER_THREAD = 64


class RenderPool:
    """Runs rendering work. Jobs whose caller has given up count until their thread is free."""

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="quire-render")
        self._room = threads * QUEUED_PER_THREAD

    async def run(
        self, chars: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """`function(...)`, in place when the text is short.

        Args:
            chars: characters that the work goes through.

        Raises:
            InvalidRequest: it took longer than `render_timeout_s`.
            Overloaded: too many jobs wait.
        """
        settings = gateway_settings()
        if chars <= settings.inline_render_chars:
            return function(*args, **kwargs)
        return await self.run_in_thread(settings.render_timeout_s, function, *args, **kwargs)

    async def run_in_thread(
        self, limit_s: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """`function(...)` in a thread. Raises as `run` does."""
        if self._room <= 0:
            raise Overloaded("Too many prompts wait to be tokenised. Try again in a moment.")
        self._room -= 1
        loop = asyncio.get_running_loop()
        job = self._threads.submit(lambda: function(*args, **kwargs))
        job.add_done_callback(lambda _: self._free(loop))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(job), limit_s)
        except TimeoutError:
            raise InvalidRequest(
                f"The prompt could not be rendered within {limit_s:g} s.", code="render_timeout"
            ) from None

    def _free(self, loop: asyncio.AbstractEventLoop) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._one_more)
        else:
            self._one_more()

    def _one_more(self) -> None:
        self._room += 1


@lru_cache(maxsize=1)
def render_pool() -> RenderPool:
    """This process's pool."""
    return RenderPool(gateway_settings().render_threads)
