"""Chat completions that are kept (`store`): as they are made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from django.http.response import HttpResponseBase

from engine.contract.errors import QuireError
from inference.chat import ChatTurn, TurnDelta
from inference.openai.chat_answer import ChatAnswer
from inference.openai.chat_stream import ChatStreamWriter
from inference.openai.keeping import kept_events
from inference.openai.schemas import ChatRequest
from inference.openai.serving import StreamWriter, add_headers, collect
from inference.settings import gateway_settings
from inference.web.streaming import EventStreamResponse
from inference.web.views import json_response
from storage.actions import store_completion
from tenants.authentication import Caller
from tenants.db_threads import in_db_thread

_encode = msgspec.json.Encoder().encode


class _KeepingWriter(StreamWriter[TurnDelta]):
    """Writes the chunks and collects the whole answer beside them."""

    def __init__(self, turn: ChatTurn) -> None:
        self._writer, self._answer = ChatStreamWriter(turn), ChatAnswer(turn)
        self.final: dict[str, Any] | None = None

    def begin(self) -> bytes:
        return self._writer.begin()

    def write(self, news: Iterable[TurnDelta]) -> bytes:
        news = list(news)
        for delta in news:  # first: the other one takes deltas apart
            self._answer.take(delta)
        return self._writer.write(news)

    def end(self) -> bytes:
        self.final = self._answer.body()
        return self._writer.end()

    def error(self, error: QuireError) -> bytes:
        return self._writer.error(error)


async def respond_and_keep(
    turn: ChatTurn, chat: ChatRequest, ignored: list[str], caller: Caller
) -> HttpResponseBase:
    """`respond` for a completion that is kept. Raises what that raises."""
    response: HttpResponseBase

    async def keep(body: dict[str, Any]) -> None:
        await _keep(caller, chat, body)

    try:
        if turn.job.stream:
            writer = _KeepingWriter(turn)
            first = await turn.next(gateway_settings().stream_start_wait_s)
            events = kept_events(turn, writer, first, writer, keep)
            response = EventStreamResponse(events, turn.release)
        else:
            answer = ChatAnswer(turn)
            await collect(turn, answer.take)
            body = answer.body()
            await keep(body)
            response = json_response(_encode(body))
    except BaseException:
        turn.release()
        raise
    add_headers(response, turn, ignored)
    return response


async def _keep(caller: Caller, chat: ChatRequest, body: dict[str, Any]) -> None:
    def store() -> None:
        store_completion(
            caller=caller,
            public_id=body["id"],
            model=body["model"],
            messages=kept_messages(body["id"], chat.raw_messages),
            metadata=dict(chat.metadata or {}),
            body=body,
        )

    await in_db_thread(store)


def kept_messages(completion_id: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as they are listed later: each with an id, and with parts apart from text."""
    kept = []
    for place, message in enumerate(messages):
        content = message.get("content")
        parts = content if isinstance(content, list) else None
        kept.append(
            {
                **message,
                "id": f"{completion_id}-{place}",
                "content": None if parts is not None else content,
                "content_parts": parts,
            }
        )
    return kept
