"""A client that speaks ASGI itself: sees each chunk as it is sent, and can leave at any moment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Reply:
    """A whole response."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The envelope's inside; fails unless it's exactly OpenAI's."""
        value = self.json()
        assert set(value) == {"error"}, value
        assert set(value["error"]) == {"message", "type", "param", "code"}, value
        assert self.headers["content-type"] == "application/json"
        return value["error"]

    @property
    def events(self) -> list[Any]:
        """A stream's JSON events; checks that it ends with [DONE] or an error."""
        return parse_events(self.body)


def parse_events(body: bytes) -> list[Any]:
    """The data of each event, `[DONE]` as a string."""
    events: list[Any] = []
    for block in body.decode().split("\n\n"):
        for line in block.split("\n"):
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                events.append(data if data == "[DONE]" else json.loads(data))
    return events


@dataclass
class Exchange:
    """One request on its way."""

    app: Any
    scope: dict[str, Any]
    parts: list[bytes]
    sent: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    received: list[bytes] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    accept: asyncio.Event = field(default_factory=asyncio.Event)

    async def _receive(self) -> dict[str, Any]:
        if self.parts:
            body = self.parts.pop(0)
            self.received.append(body)
            return {"type": "http.request", "body": body, "more_body": bool(self.parts)}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await self.accept.wait()  # a slow reader's backpressure
        await self.sent.put(message)
        await asyncio.sleep(0)

    async def _run(self) -> None:
        try:
            await self.app(self.scope, self._receive, self._send)
        finally:
            await self.sent.put({"type": "end"})

    def start(self) -> Exchange:
        self.accept.set()
        self.task = asyncio.create_task(self._run())
        return self

    async def head(self) -> tuple[int, dict[str, str]]:
        message = await self.sent.get()
        assert message["type"] == "http.response.start", message
        headers = {k.decode().lower(): v.decode("latin1") for k, v in message["headers"]}
        return message["status"], headers

    async def chunks(self) -> AsyncIterator[bytes]:
        while (message := await self.sent.get())["type"] == "http.response.body":
            if message.get("body"):
                yield message["body"]
            if not message.get("more_body"):
                break

    async def leave(self) -> None:
        """Disconnect, and wait until the application has noticed."""
        self.gone.set()
        assert self.task is not None
        await asyncio.wait_for(self.task, 60)

    async def reply(self) -> Reply:
        status, headers = await self.head()
        body = b"".join([chunk async for chunk in self.chunks()])
        await self.leave()
        return Reply(status, headers, body)


class AsgiClient:
    """Requests to one ASGI application, with a key."""

    def __init__(self, app: Any, key: str | None = None) -> None:
        self.app, self.key = app, key

    def open(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        parts: Iterable[bytes] | None = None,
    ) -> Exchange:
        """Start a request. `parts`: the body as it arrives, instead of `body` as JSON."""
        names = {"host": "testserver"}
        if self.key:
            names["authorization"] = f"Bearer {self.key}"
        if body is not None or parts is not None:
            names["content-type"] = "application/json"
        names |= headers or {}
        data = body if isinstance(body, bytes) else json.dumps(body).encode() if body else b""
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path.partition("?")[0],
            "raw_path": path.partition("?")[0].encode(),
            "query_string": path.partition("?")[2].encode(),
            "root_path": "",
            "headers": [(k.lower().encode(), v.encode("latin1")) for k, v in names.items()],
            "client": ("127.0.0.1", 1),
            "server": ("testserver", 80),
        }
        return Exchange(self.app, scope, list(parts) if parts is not None else [data]).start()

    async def request(self, method: str, path: str, body: Any = None, **options: Any) -> Reply:
        """A whole exchange."""
        return await asyncio.wait_for(self.open(method, path, body, **options).reply(), 60)

    async def get(self, path: str, **options: Any) -> Reply:
        return await self.request("GET", path, **options)

    async def post(self, path: str, body: Any = None, **options: Any) -> Reply:
        return await self.request("POST", path, body, **options)

    async def chat(self, text: str = "hello", **fields: Any) -> Reply:
        """A chat completion with one user message."""
        return await self.post("/v1/chat/completions", chat_body(text, **fields))

    async def complete(self, prompt: Any = "hello", **fields: Any) -> Reply:
        """A completion."""
        return await self.post("/v1/completions", {"model": "fake", "prompt": prompt, **fields})


def chat_body(text: str = "hello", **fields: Any) -> dict[str, Any]:
    """A chat with one user message."""
    return {"model": "fake", "messages": [{"role": "user", "content": text}], **fields}
