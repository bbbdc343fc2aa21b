"""`SessionConsumer`: the WebSockets of pages, for logged-in users."""

from __future__ import annotations

from typing import Any

import msgspec
from channels.generic.websocket import AsyncJsonWebsocketConsumer

from engine.contract.errors import QuireError
from inference.errors import envelope
from inference.web.json_body import parse_object
from tenants.sessions import snapshot_session
from tenants.websockets import (
    BAD_MESSAGES,
    FOREIGN_ORIGIN,
    NOT_LOGGED_IN,
    origin_allowed,
    session_monitor,
    user_of_session,
)

_encode = msgspec.json.Encoder().encode


class SessionConsumer(AsyncJsonWebsocketConsumer):
    """Authenticates its user, and closes within two seconds of the session's end.

    The socket is accepted before anything is checked, so that a rejection carries a close code that
    the page understands.

    Attributes:
        user: None before the checks, and once the session has ended.
        max_frame_chars: maximum size of a frame from the page; a longer one closes the socket.
        max_depth: maximum depth of its JSON.
        max_bad_frames: number of frames with errors after which the socket is closed.
    """

    # A channel layer without groups: an idle socket has no subscription in Redis.
    channel_layer_alias = "none"
    user: Any = None
    max_frame_chars = 1 << 14
    max_depth = 8
    max_bad_frames = 5
    _num_bad_frames = 0

    async def on_open(self) -> None:
        """Called once the user is authenticated. Raises `QuireError` for one without access."""

    async def on_close(self) -> None:
        """Called when the socket is closed."""

    async def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Serve the socket, and clean up when it is closed.

        The clean-up isn't in `disconnect`, which isn't called if an earlier step raises.
        """
        try:
            await super().__call__(*args, **kwargs)
        finally:
            session_monitor.remove(self.end_session)
            await self.on_close()

    async def connect(self) -> None:
        await self.accept()
        if not origin_allowed(dict(self.scope["headers"])):
            await self.close(FOREIGN_ORIGIN)
            return
        session = self.scope.get("session")
        user = await user_of_session(session.session_key if session is not None else None)
        if user is None:
            await self.close(NOT_LOGGED_IN)
            return
        self.user = user
        session_monitor.add(snapshot_session(session.session_key, user), self.end_session)
        try:
            await self.on_open()
        except QuireError as error:
            await self.send_error(error)
            await self.end_session()

    async def end_session(self) -> None:
        """Close: the session has ended, or its user has lost a right that this socket needs."""
        self.user = None
        session_monitor.remove(self.end_session)
        await self.close(NOT_LOGGED_IN)

    async def receive(
        self, text_data: str | None = None, bytes_data: bytes | None = None, **kwargs: Any
    ) -> None:
        """Handle one frame with `receive_json`, which may raise `QuireError`."""
        if text_data is None or len(text_data) > self.max_frame_chars:
            await self.close(BAD_MESSAGES)
            return
        if self.user is None:
            return  # already closing
        try:
            body = text_data.encode("utf-8", "surrogatepass")
            await self.receive_json(parse_object(body, self.max_depth))
        except QuireError as error:
            self._num_bad_frames += 1
            await self.send_error(error)
            if self._num_bad_frames >= self.max_bad_frames:
                await self.close(BAD_MESSAGES)

    async def send_error(self, error: QuireError) -> None:
        await self.send_json({"type": "error", **envelope(error)})

    @classmethod
    async def encode_json(cls, content: Any) -> str:
        return _encode(content).decode()
