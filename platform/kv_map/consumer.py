"""`KvConsumer`: the KV map's WebSocket, `/ws/kv/`.

The page sends `{"replica": ID, "tenant": SLUG or ""}` to choose what it shows, and again to change
it. It receives the frames of `kv_map.state`, at most ten a second; frames that a slow page can't
take are merged into the next one.
"""

from __future__ import annotations

import asyncio
from typing import Any

import redis

from common.db import run_in_db_thread
from engine.contract.errors import InvalidRequest, QuireError
from inference.web.session_consumer import SessionConsumer
from kv_map.access import access_block_view
from kv_map.hub import hub
from kv_map.state import BlockView, Mirror

NOT_FOUND = 4404
FRAME_S = 0.1
#: Blocks per frame when a page opens, and the pause in seconds before the next frame: sending ten
#: thousand at once would delay every response of this process.
SLICE, SLICE_S = 1000, 0.01
#: Interval between checks whether the viewer still has access.
RECHECK_S = 2.0


class KvConsumer(SessionConsumer):
    """The WebSocket of one page, which shows one replica."""

    max_frame_chars = 1000
    max_bad_frames = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._showing: asyncio.Task[None] | None = None

    async def on_close(self) -> None:
        await self._stop()

    async def receive_json(self, content: dict[str, Any], **kwargs: Any) -> None:
        """Choose the replica and the tenant to show."""
        replica, tenant = content.get("replica"), content.get("tenant")
        if not isinstance(replica, str) or not isinstance(tenant, str):
            raise InvalidRequest("replica and tenant must be strings.", param="replica")
        await self._stop()
        self._showing = asyncio.create_task(self._show(replica, tenant))

    async def send_error(self, error: QuireError) -> None:
        """Send nothing: the page only handles frames, and the close code is enough for it."""

    async def _stop(self) -> None:
        if self._showing is not None:
            self._showing.cancel()
            await asyncio.gather(self._showing, return_exceptions=True)
            self._showing = None

    async def _show(self, replica: str, tenant: str) -> None:
        """Send frames until cancelled or until the viewer loses access."""
        try:
            sight = await run_in_db_thread(access_block_view, self.user, replica, tenant)
            view = View(sight)
            mirror = hub.join(replica, view.hear)
            try:
                if mirror.frame is not None:
                    view.hear(mirror, None, 0)
                await self._frames(view, mirror, replica, tenant)
            finally:
                hub.leave(replica, view.hear)
        except (QuireError, redis.RedisError):
            await self.close(NOT_FOUND)

    async def _frames(self, view: View, mirror: Mirror, replica: str, tenant: str) -> None:
        loop = asyncio.get_running_loop()
        checked = loop.time()
        while True:
            await view.news(RECHECK_S)
            if (frame := view.next_frame(mirror)) is not None:
                await self.send_json(frame)
            if loop.time() - checked >= RECHECK_S:
                checked = loop.time()
                await run_in_db_thread(access_block_view, self.user, replica, tenant)
            await asyncio.sleep(SLICE_S if view.pending_blocks else FRAME_S)


class View:
    """The changes since the viewer's last frame, merged until they can be sent."""

    def __init__(self, sight: BlockView) -> None:
        self._sight = sight
        self._changed: set[int] = set()
        self._evicted = 0
        self._news = asyncio.Event()
        self._is_started = False
        #: Blocks that a newly opened page hasn't received yet.
        self.pending_blocks: list[int] = []

    def hear(self, mirror: Mirror, changed: set[int] | None, evicted: int) -> None:
        """Called by the hub with each frame."""
        if changed is None:
            self._is_started = False
        else:
            self._changed |= changed
            self._evicted += evicted
        self._news.set()

    async def news(self, wait_s: float) -> None:
        """Wait for a frame, at most `wait_s` seconds."""
        if self.pending_blocks:
            return
        try:
            async with asyncio.timeout(wait_s):
                await self._news.wait()
        except TimeoutError:
            return

    def next_frame(self, mirror: Mirror) -> dict[str, Any] | None:
        """Return the next frame to send, or None."""
        if mirror.frame is None or not (self.pending_blocks or self._news.is_set()):
            return None
        if not self._is_started:
            self._is_started, self._changed, self._evicted = True, set(), 0
            self._news.clear()
            self.pending_blocks = self._sight.visible_blocks(mirror)
            return self._sight.full_frame(mirror, self._slice())
        if self.pending_blocks:
            return self._sight.delta(mirror, self._slice(), 0)
        self._news.clear()
        changed, evicted = self._changed, self._evicted
        self._changed, self._evicted = set(), 0
        return self._sight.delta(mirror, changed, evicted)

    def _slice(self) -> list[int]:
        """Remove and return the next pending blocks."""
        blocks, self.pending_blocks = self.pending_blocks[:SLICE], self.pending_blocks[SLICE:]
        return blocks
