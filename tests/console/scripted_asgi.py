"""The console with a playground socket that plays what a test wrote: any text, error or silence.

Speaks the playground's protocol; pages, sessions and models are the real ones. The last message
says what to do, as JSON:

    {"text": str, "cut": characters a delta, "pause": seconds between deltas,
     "reasoning": what comes before the text}
    {"error": {"message", "type", "param", "code"}, "text": what comes before it}
    {"close": code, "text": ...}
    {"frames": [...]}: these frames, before the text
    {"echo": true}: the request itself, as an indented code block

Tools return their arguments; see `call_tool`.

Anything else is answered with "You said: ...".
"""

# ruff: noqa: E402 - Django must be set up before Channels is imported

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import defaultdict
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")

from django.core.asgi import get_asgi_application

django_application = get_asgi_application()

from channels.auth import AuthMiddlewareStack
from channels.generic.websocket import AsyncWebsocketConsumer
from channels.routing import ProtocolTypeRouter, URLRouter
from django.urls import path


class ScriptedConsumer(AsyncWebsocketConsumer):
    """Answers by script; see the module."""

    async def connect(self) -> None:
        self.running: dict[str, asyncio.Task[None]] = {}
        self.stopped: set[str] = set()
        self.stops: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        await self.accept()
        if not self.scope["user"].is_authenticated:
            await self.close(4401)

    async def disconnect(self, code: int) -> None:
        for task in self.running.values():
            task.cancel()

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        frame = json.loads(text_data or "")
        if frame["type"] == "ping":
            await self.say(type="pong")
        elif frame["type"] == "stop":
            self.stopped.add(frame["id"])
            self.stops[frame["id"]].set()
        elif frame["type"] == "call_tool":
            self.running[frame["id"]] = asyncio.create_task(self.call_tool(frame))
        else:
            self.running[frame["id"]] = asyncio.create_task(self.play(frame))

    async def call_tool(self, frame: dict[str, Any]) -> None:
        """Return the arguments; with `{"hang": true}` wait until it is stopped."""
        hangs = json.loads(frame["arguments"]).get("hang", False)
        if hangs:
            await self.stops[frame["id"]].wait()
        text = "The user stopped this call." if hangs else f"Ran with {frame['arguments']}"
        await self.say(type="tool_result", id=frame["id"], text=text, is_error=hangs)

    async def say(self, **frame: Any) -> None:
        await self.send(json.dumps(frame))

    async def play(self, frame: dict[str, Any]) -> None:
        id_, content, started = frame["id"], frame["messages"][-1]["content"], time.monotonic()
        if isinstance(content, list):
            content = describe_parts(content)
        script = read_script(content, frame)
        await self.say(type="start", id=id_, request_id=f"req-{id_}", model=frame["model"])
        text, cut = script.get("text", ""), script.get("cut", 7)
        for one_frame in script.get("frames", []):
            await self.say(**one_frame, id=id_)
            await asyncio.sleep(script.get("pause", 0.0))
        for kind, full in (("reasoning", script.get("reasoning", "")), ("delta", text)):
            for index in range(0, len(full), cut):
                if id_ in self.stopped:
                    break
                await self.say(type=kind, id=id_, text=full[index : index + cut])
                await asyncio.sleep(script.get("pause", 0.0))
        if "close" in script:
            await self.close(script["close"])
        elif "error" in script:
            await self.say(type="error", id=id_, error=script["error"])
        else:
            await self.done(id_, text, time.monotonic() - started, script.get("reason", "stop"))

    async def done(self, id_: str, text: str, seconds: float, reason: str) -> None:
        tokens = max(1, len(text) // 4)
        usage = {
            "prompt_tokens": 31,
            "completion_tokens": tokens,
            "total_tokens": 31 + tokens,
            "prompt_tokens_details": {"cached_tokens": 16},
        }
        await self.say(
            type="done",
            id=id_,
            finish_reason=reason,
            usage=usage,
            ttft_ms=84.6,
            tokens_per_s=tokens / max(seconds, 0.01),
        )


def describe_parts(parts: list[dict[str, Any]]) -> str:
    """The text of a message's parts, and how many pictures, or which document, come before it."""
    texts = [part["text"] for part in parts if part["type"] == "text"]
    files = {part["file_id"] for part in parts if part["type"] == "image_url"}
    for part in parts:
        if part["type"] == "file":
            return f"file {part['file']['filename']}, {' '.join(texts)}"
    return f"{len(files)} pictures, {' '.join(texts) or 'no text'}"


def read_script(reported_text: str, frame: dict[str, Any]) -> dict[str, Any]:
    """What the message asks for."""
    if frame["messages"][-1]["role"] == "tool" or not reported_text.startswith("{"):
        return {"text": f"You said: {reported_text}"}
    script = json.loads(reported_text)
    if script.get("echo"):
        text = json.dumps({k: v for k, v in frame.items() if k != "messages"}, indent=1)
        roles = [message["role"] for message in frame["messages"]]
        return {"text": f"```json\n{text}\n```\nroles: {', '.join(roles)}", "cut": 10_000}
    return script


application = ProtocolTypeRouter(
    {
        "http": django_application,
        "websocket": AuthMiddlewareStack(
            URLRouter([path("ws/playground/", ScriptedConsumer.as_asgi())])
        ),
    }
)
