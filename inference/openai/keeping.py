"""A stream whose answer is kept before its last event leaves: who has read it can ask for it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from engine.contract.errors import QuireError
from inference.errors import as_quire_error, report
from inference.openai.serving import Source, StreamWriter, stream_events
from storage.room import check_answers, is_known
from tenants.authentication import Caller
from tenants.db_threads import in_db_thread

N = TypeVar("N")


async def check_room(caller: Caller) -> None:
    """Raise `StorageFull` (413) when the tenant has no room for an answer; before it's made."""
    if not is_known(caller.tenant_id):
        await in_db_thread(check_answers, caller.tenant_id)


class Keeping(Protocol):
    """A stream writer that has the whole answer in the end."""

    @property
    def final(self) -> dict[str, Any] | None:
        """The answer, once its last event is written."""

    def error(self, error: QuireError) -> bytes:
        """The stream's last event when something failed."""


async def kept_events(
    source: Source[N],
    writer: StreamWriter[N],
    news: Sequence[N],
    answer: Keeping,
    keep: Callable[[dict[str, Any]], Awaitable[None]],
) -> AsyncGenerator[bytes, None]:
    """`stream_events`, with `keep` before what comes last. What can't be kept is an error."""
    async with aclosing(stream_events(source, writer, news)) as events:
        async for chunk in events:
            if answer.final is not None:
                try:
                    await keep(answer.final)
                except Exception as error:
                    report(error, source.job.request_id)
                    yield answer.error(as_quire_error(error))
                    return
            yield chunk
