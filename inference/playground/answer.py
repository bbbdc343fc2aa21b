"""One answer of the playground: from a `generate` message to its `done` or `error`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from engine.contract.errors import InvalidRequest
from inference.chat import ChatTurn, TurnDelta
from inference.errors import as_quire_error, envelope, report
from inference.generation import Generation, Usage
from inference.openai.logprobs import chat_logprobs
from inference.openai.schemas import ChatRequest
from inference.openai.serving import parse
from inference.parsing.parts import BEGINNINGS, joined
from inference.playground.access import SessionEnded
from inference.rendering.pool import rendering_for
from inference.resuming.position import ask_from
from inference.web.asked import Asked, asked, note_refusal
from tenants.authentication import Caller

Send = Callable[[dict[str, Any]], Awaitable[None]]
#: How often the session is looked at while no token comes.
WAKE_EVERY_S = 1.0
#: Fields of a chat request that a frame may have beside `sampling`.
BESIDE = ("tools", "tool_choice", "response_format")
#: Fields of a chat request that `sampling` may not hold: they aren't sampling.
NOT_SAMPLING = frozenset({"model", "messages", "stream", "stream_options", "n", "best_of", *BESIDE})


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
        rendering_for.set(self._caller.tenant)
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
        ask_from(_after(self._message))
        chat = parse(ChatRequest, _body(self._message))
        for name in chat.ignored_fields():
            raise InvalidRequest(f"'{name[:50]}' isn't a sampling field.", param=name[:50])
        return await ChatTurn.start(
            chat, caller=self._caller, received=received, endpoint="playground"
        )

    async def _stream(self, turn: ChatTurn) -> str | None:
        """Frames up to the last delta; returns the finish reason."""
        job, generation = turn.job, turn.generation
        start = {"type": "start", "request_id": job.request_id, "model": job.served.name}
        await self._say([start], f"{job.request_id}:1:b1")
        reason: str | None = None
        if generation.has_told_tokens:  # the page has these from before its connection broke
            told = await turn.next()
            reason = told[-1].finish_reason if told else None
        waiting = False
        while not turn.finished:
            deltas = await turn.next(WAKE_EVERY_S)
            await self._check()
            if generation.waiting and not waiting:
                await self._say([{"type": "waiting"}])
            waiting = generation.waiting
            await self._say(
                [frame for delta in deltas for frame in frames_of(delta, turn)], _at(turn)
            )
            reason = deltas[-1].finish_reason if deltas else reason
        return reason

    async def _say(self, frames: list[dict[str, Any]], at: str | None = None) -> None:
        """Frames that belong together. The last says where the page is once it has them."""
        for frame in frames[:-1]:
            await self._send({**frame, "id": self.name, "more": True})
        for frame in frames[-1:]:
            await self._send({**frame, "id": self.name, **({"at": at} if at else {})})

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


def frames_of(delta: TurnDelta, turn: ChatTurn) -> list[dict[str, Any]]:
    """What is new as frames. Log probabilities of the tokens come with the first."""
    frames: list[dict[str, Any]] = []
    for part in joined(delta.parts):
        if part.kind in BEGINNINGS:
            frames.append(
                {"type": "call", "index": part.call, "call_id": part.id, "name": part.text}
            )
        elif part.kind in ("arguments", "input"):
            frames.append({"type": "arguments", "index": part.call, "text": part.text})
        else:
            kind = "delta" if part.kind == "content" else "reasoning"
            frames.append({"type": kind, "text": part.text})
    options, entries = turn.options, delta.increment.entries
    if options.top_logprobs is not None and entries:
        found = chat_logprobs(entries, options.names, options.top_logprobs)
        frames.append({"type": "logprobs", "tokens": list(map(_short, found))})
    return frames


def _short(token: dict[str, Any]) -> list[Any]:
    """A token's text, its log probability, and the same of its alternatives."""
    tops = [[each["token"], round(each["logprob"], 4)] for each in token["top_logprobs"]]
    return [token["token"], round(token["logprob"], 4), tops]


def _at(turn: ChatTurn) -> str:
    """The `Last-Event-ID` behind which the page can go on; see `inference.resuming`."""
    output = turn.generation.outputs[0][0]
    end = "." if output.finish_reason is not None else ""
    return f"{turn.job.request_id}:2:{output.num_tokens}{end}"


def _after(message: dict[str, Any]) -> str | None:
    """Where the page wants its answer from. Raises `InvalidRequest`."""
    after = message.get("after")
    if not isinstance(after, str | None):
        raise InvalidRequest("after must be the `at` of a frame.", param="after")
    return after


def _body(message: dict[str, Any]) -> dict[str, Any]:
    """The message as the body of a chat completion."""
    sampling = message.get("sampling") or {}
    for name in NOT_SAMPLING & sampling.keys():
        raise InvalidRequest(f"'{name}' isn't a sampling field.", param=name)
    beside = {name: message[name] for name in BESIDE if message.get(name) is not None}
    return {
        **sampling,
        **beside,
        "model": message.get("model"),
        "messages": message.get("messages"),
        "stream": True,
    }


def _tokens_per_s(generation: Generation) -> float:
    """Tokens after the first, by the time since it; 0 where there was only one, or it's unknown."""
    count = generation.usage.completion_tokens
    if generation.first_token_at is None or count < 2 or generation.resumed_from is not None:
        return 0.0
    return round((count - 1) / max(time.perf_counter() - generation.first_token_at, 1e-6), 2)
