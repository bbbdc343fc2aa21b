"""Rendering off the event loop: short prompts in place, long ones in a few threads, all in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import ParamSpec, TypeVar

from engine.contract.errors import InvalidRequest
from inference.rendering.fair_threads import FairThreads
from inference.settings import gateway_settings
from inference.turns import FEW

P = ParamSpec("P")
T = TypeVar("T")

#: For whom the current task renders.
rendering_for: ContextVar[str] = ContextVar("rendering_for", default="")
#: Whether its request goes through so much that it takes the event loop's time.
large_work: ContextVar[bool] = ContextVar("large_work", default=False)

#: Work beyond this many characters is run in a thread.
MAX_INLINE_CHARS = 128 * 1024


class RenderPool:
    """Runs rendering work. Jobs whose caller has given up count until their thread is free."""

    def __init__(self, threads: int) -> None:
        self._threads = FairThreads(threads, "quire-render", "prompts")

    async def run(
        self, chars: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """`function(...)`, in place when the text is short.

        Args:
            chars: characters that the work goes through.

        Raises:
            InvalidRequest: it took longer than `render_timeout_s`.
            Overloaded: too many jobs of the tenant wait.
        """
        settings = gateway_settings()
        if chars <= settings.inline_render_chars:
            return function(*args, **kwargs)
        return await self.run_in_thread(settings.render_timeout_s, function, *args, **kwargs)

    async def run_in_thread(
        self, limit_s: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """`function(...)` in a thread, in its tenant's turn. Raises as `run` does."""
        job = self._threads.submit(rendering_for.get(), partial(function, *args, **kwargs))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(job), limit_s)
        except TimeoutError:
            raise InvalidRequest(
                f"The prompt could not be rendered within {limit_s:g} s.", code="render_timeout"
            ) from None


def note_work(*, items: int, chars: int) -> None:
    """Tell how much the current request goes through besides its body, which may only name it."""
    if items > FEW or chars > MAX_INLINE_CHARS:
        large_work.set(True)


async def beside(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`function(...)`, which goes through all that a request is about: of much in a thread.

    Raises: what `RenderPool.run` raises.
    """
    if not large_work.get():
        return function(*args, **kwargs)
    limit_s = gateway_settings().render_timeout_s
    return await render_pool().run_in_thread(limit_s, function, *args, **kwargs)


@lru_cache(maxsize=1)
def render_pool() -> RenderPool:
    """This process's pool."""
    return RenderPool(gateway_settings().render_threads)
