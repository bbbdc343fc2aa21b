"""`PlaygroundConsumer`: the playground's WebSocket, `/ws/playground/`.

Frames are JSON text; `docs/gateway.md` lists them. The session is checked when the socket opens and
again while it is used. A frame may name one of the user's own tenants; without one it's the first
that they joined.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import Any

import msgspec
from channels.generic.websocket import AsyncWebsocketConsumer

from engine.contract.errors import InvalidRequest, QuireError
from inference.errors import envelope
from inference.playground.access import SessionEnded, origin_allowed, user_of_session
from inference.playground.answer import Answer
from inference.playground.watch import watch
from inference.settings import gateway_settings
from inference.web.json_body import parse_object
from tenants.authentication import Caller, caller_for_user
from tenants.sessions import see_session

logger = logging.getLogger(__name__)

NOT_LOGGED_IN, FOREIGN_ORIGIN, BAD_MESSAGES = 4401, 4403, 4409
MAX_FRAME_CHARS = 1 << 20
MAX_BAD_FRAMES = 5
MAX_AT_ONCE = 4
MAX_ID_CHARS = 64
MAX_TENANT_CHARS = 63
RECHECK_SESSION_S = 1.0

_encode = msgspec.json.Encoder().encode


class PlaygroundConsumer(AsyncWebsocketConsumer):
    """One browser tab. Up to `MAX_AT_ONCE` answers run at a time, each with an id of its own."""

    # No groups and no messages between sockets: an idle one holds no subscription in Redis.
    channel_layer_alias = "none"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._answers: dict[str, Answer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._bad_frames = 0
        self._checked_at = 0.0
        self._welcome = False
        self._user: Any = None
        self._callers: dict[str | None, Caller] = {}  # by tenant, of the last few seconds

    async def connect(self) -> None:
        """Accept, and close at once with a code that the page understands if it's refused."""
        await self.accept()
        if not origin_allowed(dict(self.scope["headers"])):
            await self.close(FOREIGN_ORIGIN)
            return
        try:
            await self._check_session()
            self._welcome = True
            watch.add(see_session(self.scope["session"].session_key, self._user), self._ended)
        except SessionEnded:
            await self.close(NOT_LOGGED_IN)
        except QuireError as error:
            await self._send({"type": "error", "id": None, **envelope(error)})
            await self.close(NOT_LOGGED_IN)

    async def disconnect(self, code: int) -> None:
        """Abort what runs."""
        watch.remove(self._ended)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ended(self) -> None:
        """The session was ended elsewhere."""
        self._welcome = False
        await self.close(NOT_LOGGED_IN)

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        """One frame."""
        if text_data is None or len(text_data) > MAX_FRAME_CHARS:
            await self.close(BAD_MESSAGES)
            return
        if not self._welcome:
            return  # refused already: the close is on its way
        try:
            message = parse_object(
                text_data.encode("utf-8", "surrogatepass"), gateway_settings().max_json_depth
            )
            await self._handle(message)
        except SessionEnded:
            await self.close(NOT_LOGGED_IN)
        except QuireError as error:
            await self._bad_frame(error)

    async def _handle(self, message: dict[str, Any]) -> None:
        kind = message.get("type")
        if kind == "ping":
            await self._send({"type": "pong"})
        elif kind == "stop":
            running = self._answers.get(_id_of(message))
            if running is not None:
                running.stop()
        elif kind == "generate":
            await self._generate(message)
        else:
            raise InvalidRequest(
                "type must be 'generate', 'stop' or 'ping'.", param="type", code="unknown_type"
            )

    async def _generate(self, message: dict[str, Any]) -> None:
        name = _id_of(message)
        if not isinstance(message.get("sampling"), dict | None):
            raise InvalidRequest("sampling must be an object.", param="sampling")
        tenant = _tenant_of(message)
        try:
            caller = await self._check_session(tenant)
        except QuireError as error:
            await self._send({"type": "error", "id": name, **envelope(error)})
            return
        if name in self._answers or len(self._answers) >= MAX_AT_ONCE:
            refused = InvalidRequest(
                "This id is in use."
                if name in self._answers
                else f"At most {MAX_AT_ONCE} answers may run at once.",
                param="id",
            )
            await self._send({"type": "error", "id": name, **envelope(refused)})
            return
        check = partial(self._check_session, tenant)
        self._answers[name] = Answer(message, caller, self._send, check)
        task = asyncio.create_task(self._run(self._answers[name]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, answer: Answer) -> None:
        try:
            await answer.run()
        except SessionEnded:
            await self.close(NOT_LOGGED_IN)
        finally:
            self._answers.pop(answer.name, None)

    async def _check_session(self, tenant: str | None = None) -> Caller:
        """The caller in one of the user's tenants, looked at again every few seconds.

        Raises: `SessionEnded`, or what `caller_for_user` does.
        """
        now = time.monotonic()
        if self._user is None or now - self._checked_at >= RECHECK_SESSION_S:
            self._callers = {}
            session = self.scope.get("session")
            self._user = await user_of_session(session.session_key if session is not None else None)
            self._checked_at = now
        if self._user is None:
            self._welcome = False
            raise SessionEnded
        if tenant not in self._callers:
            self._callers[tenant] = await caller_for_user(self._user, tenant)
        return self._callers[tenant]

    async def _bad_frame(self, error: QuireError) -> None:
        self._bad_frames += 1
        await self._send({"type": "error", "id": None, **envelope(error)})
        if self._bad_frames >= MAX_BAD_FRAMES:
            await self.close(BAD_MESSAGES)

    async def _send(self, frame: dict[str, Any]) -> None:
        await self.send(text_data=_encode(frame).decode())


def _tenant_of(message: dict[str, Any]) -> str | None:
    """The tenant that the frame names, or None. Raises `InvalidRequest`."""
    tenant = message.get("tenant")
    if tenant is None:
        return None
    if not isinstance(tenant, str) or not 0 < len(tenant) <= MAX_TENANT_CHARS:
        raise InvalidRequest("tenant must be the name of a tenant.", param="tenant")
    return tenant


def _id_of(message: dict[str, Any]) -> str:
    """The answer's id: the client's own word for it. Raises `InvalidRequest`."""
    name = message.get("id")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_ID_CHARS or not name.isprintable():
        raise InvalidRequest(f"id must be a word of 1 to {MAX_ID_CHARS} characters.", param="id")
    return name
