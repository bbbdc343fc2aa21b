"""One answer of the playground: from a `generate` message to its `done` or `error`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from engine.contract.errors import InvalidRequest
from inference.chat import ChatTurn
from inference.errors import as_quire_error, envelope, report
from inference.generation import Generation, Usage
from inference.openai.schemas import ChatRequest
from inference.openai.serving import parse
from inference.playground.access import SessionEnded
from inference.web.asked import Asked, asked, note_refusal
from tenants.authentication import Caller

Send = Callable[[dict[str, Any]], Awaitable[None]]
#: How often the session is looked at while no token comes.
WAKE_EVERY_S = 1.0
#: Fields of a chat request that `sampling` may not hold: they aren't sampling.
NOT_SAMPLING = frozenset({"model", "messages", "stream", "stream_options", "n", "best_of", "tools"})


class Answer:
    """Generates and sends frames. Errors become an `error` frame; cancelling its task aborts.

    Args:
        message: a `generate` message with a checked id.
        check: called between frames; raises `SessionEnded` when the session may not go on.
    """

    def __init__(
        self,
        message: dict[str, Any],
        caller: Caller,
        send: Send,
        check: Callable[[], Awaitable[object]],
    ) -> None:
        self.name: str = message["id"]
        self._message, self._caller = message, caller
        self._send, self._check = send, check
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    def stop(self) -> None:
        """End it early, as the user wishes: a `done` frame with what there is."""
        if self._task is not None and not self._stopped:
            self._stopped = True
            self._task.cancel()

    async def run(self) -> None:
        """All frames, in order. Raises `SessionEnded`."""
        self._task = asyncio.current_task()
        asked.set(
            Asked("", "playground", self._caller, model=str(self._message.get("model"))[:200])
        )
        turn: ChatTurn | None = None
        reason: str | None = None
        try:
            turn = await self._start()
            reason = await self._stream(turn)
        except asyncio.CancelledError:
            if not self._stopped or self._task is None:
                raise
            self._task.uncancel()
            reason = "stop"
        except SessionEnded:
            raise
        except Exception as error:
            note_refusal(error)
            report(error, self.name)
            failure = envelope(as_quire_error(error))
            await self._send({"type": "error", "id": self.name, **failure})
            return
        finally:
            if turn is not None:
                turn.release()
        await self._send(self._done(turn, reason))

    async def _start(self) -> ChatTurn:
        received = time.perf_counter()
        self._caller.require("inference")
        chat = parse(ChatRequest, _body(self._message))
        for name in chat.ignored_fields():
            raise InvalidRequest(f"'{name[:50]}' is no sampling field.", param=name[:50])
        return await ChatTurn.start(
            chat, caller=self._caller, received=received, endpoint="playground"
        )

    async def _stream(self, turn: ChatTurn) -> str | None:
        """Frames up to the last delta; returns the finish reason."""
        job = turn.job
        await self._send(
            {
                "type": "start",
                "id": self.name,
                "request_id": job.request_id,
                "model": job.served.name,
            }
        )
        reason: str | None = None
        while not turn.finished:
            deltas = await turn.next(WAKE_EVERY_S)
            await self._check()
            for kind, frame in (("reasoning", "reasoning"), ("content", "delta")):
                parts = [part for delta in deltas for part in delta.parts if part.kind == kind]
                if text := "".join(part.text for part in parts):
                    await self._send({"type": frame, "id": self.name, "text": text})
            reason = deltas[-1].finish_reason if deltas else None
        return reason

    def _done(self, turn: ChatTurn | None, reason: str | None) -> dict[str, Any]:
        usage = turn.usage if turn is not None else Usage()
        return {
            "type": "done",
            "id": self.name,
            "finish_reason": reason,
            "usage": usage.as_openai(),
            "ttft_ms": turn.generation.ttft_ms if turn is not None else None,
            "tokens_per_s": _tokens_per_s(turn.generation) if turn is not None else 0.0,
        }


def _body(message: dict[str, Any]) -> dict[str, Any]:
    """The message as the body of a chat completion."""
    sampling = message.get("sampling") or {}
    for name in NOT_SAMPLING & sampling.keys():
        raise InvalidRequest(f"'{name}' is no sampling field.", param=name)
    return {
        **sampling,
        "model": message.get("model"),
        "messages": message.get("messages"),
        "stream": True,
    }


def _tokens_per_s(generation: Generation) -> float:
    """Tokens after the first, by the time since it; 0 where there was only one."""
    count = generation.usage.completion_tokens
    if generation.first_token_at is None or count < 2:
        return 0.0
    return round((count - 1) / max(time.perf_counter() - generation.first_token_at, 1e-6), 2)
