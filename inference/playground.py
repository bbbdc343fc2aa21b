"""The playground's WebSocket and its answers, from a `generate` frame to `done` or `error`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from common.draining import keep_open_while
from common.log_context import bind_request
from common.rates import decode_tokens_per_s
from engine.contract.errors import InvalidRequest, QuireError
from inference.chat.turn import ChatSession, TurnDelta
from inference.errors import as_quire_error, envelope, report
from inference.generation.generation import Generation
from inference.generation.logprobs import chat_logprobs
from inference.parsers.state_machine import START_KINDS, merge_adjacent
from inference.playground_tools import ToolCall, add_offered_tools
from inference.request.context import RequestContext, RequestRecord, log_rejected_request
from inference.request.job import Usage
from inference.schemas.chat import ChatRequest
from inference.serving.respond import parse
from inference.web.json_body import MAX_JSON_DEPTH
from inference.web.session_consumer import SessionConsumer
from tenants.authentication import Caller, caller_for_user
from tenants.websockets import SessionExpired, user_of_session

logger = logging.getLogger(__name__)

Send = Callable[[dict[str, Any]], Awaitable[None]]
#: Seconds between two checks of the session while no token arrives.
SESSION_POLL_INTERVAL_S = 1.0
#: Fields of a chat request that a frame may have in addition to `sampling`.
CHAT_FIELDS = ("tools", "tool_choice", "response_format")
#: Fields of a chat request that `sampling` must not have.
NON_SAMPLING_FIELDS = frozenset(
    {"model", "messages", "stream", "stream_options", "n", "best_of", *CHAT_FIELDS}
)


class PlaygroundAnswer:
    """Generates an answer and sends its frames. Errors are sent as an `error` frame; cancelling its
    task aborts the generation.

    Args:
        message: a `generate` frame with a checked id.
        check: called between frames; raises `SessionExpired` when the session has ended.
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
        """Stop early at the user's request, with a `done` frame."""
        if self._task is not None and not self._stopped:
            self._stopped = True
            self._task.cancel()

    async def run(self) -> None:
        """Send all frames, in order. Raises `SessionExpired`."""
        self._task = asyncio.current_task()
        record = RequestRecord("playground", model=str(self._message.get("model"))[:200])
        bind_request(request_id=self.name, tenant=self._caller.tenant, model=record.model)
        ctx = RequestContext(caller=self._caller, record=record)
        turn: ChatSession | None = None
        reason: str | None = None
        try:
            turn = await self._start(ctx)
            bind_request(request_id=turn.job.request_id)
            reason = await self._stream(turn)
        except asyncio.CancelledError:
            if not self._stopped or self._task is None:
                raise
            self._task.uncancel()
            reason = "stop"
        except SessionExpired:
            raise
        except Exception as error:
            log_rejected_request(ctx, error)
            report(error, self.name)
            failure = envelope(as_quire_error(error))
            await self._send({"type": "error", "id": self.name, **failure})
            return
        finally:
            if turn is not None:
                turn.release()
        await self._send(self._done(turn, reason))

    async def _start(self, ctx: RequestContext) -> ChatSession:
        self._caller.require("inference")
        ctx = replace(ctx, last_event_id=_after(self._message))
        body = _body(self._message)
        if (names := self._message.get("mcp_servers")) is not None:
            await add_offered_tools(body, names, self._caller)
        chat = parse(ChatRequest, body)
        for name in chat.ignored_fields():
            raise InvalidRequest(f"'{name[:50]}' isn't a sampling field.", param=name[:50])
        return await ChatSession.start(chat, ctx, endpoint="playground")

    async def _stream(self, turn: ChatSession) -> str | None:
        """Send frames up to the last delta; return the finish reason."""
        job, generation = turn.job, turn.generation
        start = {"type": "start", "request_id": job.request_id, "model": job.model.name}
        await self._send_frames([start], f"{job.request_id}:1:b1")
        reason: str | None = None
        if generation.has_delivered_tokens:  # the page received these before its connection broke
            received = await turn.next()
            reason = received[-1].finish_reason if received else None
        waiting = False
        while not turn.finished:
            deltas = await turn.next(SESSION_POLL_INTERVAL_S)
            await self._check()
            if generation.waiting and not waiting:
                await self._send_frames([{"type": "waiting"}])
            waiting = generation.waiting
            await self._send_frames(
                [frame for delta in deltas for frame in build_frames(delta, turn)], _resume_id(turn)
            )
            reason = deltas[-1].finish_reason if deltas else reason
        return reason

    async def _send_frames(self, frames: list[dict[str, Any]], position: str | None = None) -> None:
        """Send frames that belong together. The last one carries the `position` after them."""
        for frame in frames[:-1]:
            await self._send({**frame, "id": self.name, "more": True})
        for frame in frames[-1:]:
            await self._send({**frame, "id": self.name, **({"at": position} if position else {})})

    def _done(self, turn: ChatSession | None, reason: str | None) -> dict[str, Any]:
        usage = turn.usage if turn is not None else Usage()
        return {
            "type": "done",
            "id": self.name,
            "finish_reason": reason,
            "usage": usage.to_openai(),
            "ttft_ms": turn.generation.ttft_ms if turn is not None else None,
            "tokens_per_s": _tokens_per_s(turn.generation) if turn is not None else 0.0,
        }


def build_frames(delta: TurnDelta, turn: ChatSession) -> list[dict[str, Any]]:
    """A delta as frames, with the log probabilities of its tokens last."""
    frames: list[dict[str, Any]] = []
    for part in merge_adjacent(delta.parts):
        if part.kind in START_KINDS:
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
        logprobs = chat_logprobs(entries, options.names, options.top_logprobs)
        frames.append({"type": "logprobs", "tokens": list(map(_short, logprobs))})
    return frames


def _short(token: dict[str, Any]) -> list[Any]:
    """A token's text, its log probability, and those of its alternatives."""
    tops = [[top["token"], round(top["logprob"], 4)] for top in token["top_logprobs"]]
    return [token["token"], round(token["logprob"], 4), tops]


def _resume_id(turn: ChatSession) -> str:
    """The event id after which the page can resume; see `StreamPosition`."""
    output = turn.generation.outputs[0][0]
    end = "." if output.finish_reason is not None else ""
    return f"{turn.job.request_id}:2:{output.num_tokens}{end}"


def _after(message: dict[str, Any]) -> str | None:
    """The event id after which the page resumes its answer. Raises `InvalidRequest`."""
    after = message.get("after")
    if not isinstance(after, str | None):
        raise InvalidRequest("after must be the `at` of a frame.", param="after")
    return after


def _body(message: dict[str, Any]) -> dict[str, Any]:
    """The message as the body of a chat completion."""
    sampling = message.get("sampling") or {}
    for name in NON_SAMPLING_FIELDS & sampling.keys():
        raise InvalidRequest(f"'{name}' isn't a sampling field.", param=name)
    return {
        **sampling,
        **{name: message[name] for name in CHAT_FIELDS if message.get(name) is not None},
        "model": message.get("model"),
        "messages": message.get("messages"),
        "stream": True,
    }


def _tokens_per_s(generation: Generation) -> float:
    """Tokens per second after the first; 0 if unknown, or if the time is too short to tell."""
    count = generation.usage.completion_tokens
    if generation.first_token_at is None or generation.resumed_from is not None:
        return 0.0
    seconds = time.perf_counter() - generation.first_token_at
    return round(decode_tokens_per_s(count, seconds) or 0.0, 2)


MAX_RUNNING_ANSWERS = 4
MAX_ID_CHARS = 64
MAX_TENANT_CHARS = 63
RECHECK_SESSION_S = 1.0


class PlaygroundConsumer(SessionConsumer):
    """`/ws/playground/`: one browser tab, with up to `MAX_RUNNING_ANSWERS` concurrent answers and
    tool calls.

    Frames are JSON text, listed in `docs/gateway.md`. The session is checked when the socket opens
    and while it is used. A frame may name one of the user's tenants; the default is the first that
    the user joined.
    """

    max_frame_chars = 1 << 20
    max_depth = MAX_JSON_DEPTH

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._answers: dict[str, PlaygroundAnswer | ToolCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._checked_at = 0.0
        self._callers: dict[str | None, Caller] = {}  # by tenant, since the last check

    async def on_open(self) -> None:
        self._checked_at = time.monotonic()
        self._callers[None] = await caller_for_user(self.user)
        keep_open_while(self.scope, lambda: bool(self._answers))

    async def on_close(self) -> None:
        """Abort running answers and calls."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def send_error(self, error: QuireError) -> None:
        await self.send_json({"type": "error", "id": None, **envelope(error)})

    async def receive_json(self, content: dict[str, Any], **kwargs: Any) -> None:
        kind = content.get("type")
        if kind == "ping":
            await self.send_json({"type": "pong"})
        elif kind == "stop":
            running = self._answers.get(_id_of(content))
            if running is not None:
                running.stop()
        elif kind in ("generate", "call_tool"):
            try:
                await self._start(content)
            except SessionExpired:
                await self.end_session()
        else:
            raise InvalidRequest(
                "type must be 'generate', 'call_tool', 'stop' or 'ping'.",
                param="type",
                code="unknown_type",
            )

    async def _start(self, message: dict[str, Any]) -> None:
        """Start an answer or a tool call in its own task."""
        name = _id_of(message)
        if not isinstance(message.get("sampling"), dict | None):
            raise InvalidRequest("sampling must be an object.", param="sampling")
        tenant = _tenant_of(message)
        try:
            caller = await self._check_session(tenant)
        except QuireError as error:
            await self.send_json({"type": "error", "id": name, **envelope(error)})
            return
        if name in self._answers or len(self._answers) >= MAX_RUNNING_ANSWERS:
            refused = InvalidRequest(
                "This id is in use."
                if name in self._answers
                else f"At most {MAX_RUNNING_ANSWERS} answers may run at once.",
                param="id",
            )
            await self.send_json({"type": "error", "id": name, **envelope(refused)})
            return
        if message["type"] == "call_tool":
            self._answers[name] = ToolCall(message, caller, self.send_json)
        else:
            check = partial(self._check_session, tenant)
            self._answers[name] = PlaygroundAnswer(message, caller, self.send_json, check)
        task = asyncio.create_task(self._run(self._answers[name]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, answer: PlaygroundAnswer | ToolCall) -> None:
        try:
            await answer.run()
        except SessionExpired:
            await self.end_session()
        finally:
            self._answers.pop(answer.name, None)

    async def _check_session(self, tenant: str | None = None) -> Caller:
        """The caller in one of the user's tenants, checked again every `RECHECK_SESSION_S`.

        Raises: `SessionExpired`, or what `caller_for_user` does.
        """
        now = time.monotonic()
        if self.user is None or now - self._checked_at >= RECHECK_SESSION_S:
            self._callers = {}
            session = self.scope.get("session")
            self.user = await user_of_session(session.session_key if session is not None else None)
            self._checked_at = now
        if self.user is None:
            raise SessionExpired
        if tenant not in self._callers:
            self._callers[tenant] = await caller_for_user(self.user, tenant)
        return self._callers[tenant]


def _tenant_of(message: dict[str, Any]) -> str | None:
    """The tenant that the frame names, or None. Raises `InvalidRequest`."""
    tenant = message.get("tenant")
    if tenant is None:
        return None
    if not isinstance(tenant, str) or not 0 < len(tenant) <= MAX_TENANT_CHARS:
        raise InvalidRequest("tenant must be the name of a tenant.", param="tenant")
    return tenant


def _id_of(message: dict[str, Any]) -> str:
    """The answer's id, chosen by the client. Raises `InvalidRequest`."""
    name = message.get("id")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_ID_CHARS or not name.isprintable():
        raise InvalidRequest(f"id must be a word of 1 to {MAX_ID_CHARS} characters.", param="id")
    return name
