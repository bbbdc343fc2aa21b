"""`Asked`: the request that is being served, as far as its record needs it later."""

from __future__ import annotations

import secrets
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus

from engine.contract.errors import QuireError
from inference.errors import as_quire_error
from metering.access import RequestNote, UsageRecord, keep_refusal
from tenants.authentication import Caller

#: Ends of paths and what the ledger calls them are the same but for these.
_VERSION = "/v1/"


@dataclass(slots=True)
class Asked:
    """One request from outside.

    Attributes:
        header_id: its `x-request-id`. answer_id: what its answer is called, where that's another
            id than the ledger's.
        endpoint: as in the ledger. model: as the client named it.
        ran: whether something was admitted: what ran is noted when it ends.
    """

    header_id: str
    endpoint: str
    caller: Caller | None = None
    answer_id: str = ""
    model: str = ""
    stream: bool = False
    ran: bool = False
    received: float = field(default_factory=time.perf_counter)


#: Of the task at hand; None where a request isn't recorded.
asked: ContextVar[Asked | None] = ContextVar("asked", default=None)


def endpoint_of(path: str) -> str:
    """What the ledger calls a path: `/v1/chat/completions` is "chat.completions"."""
    return path.removeprefix(_VERSION).strip("/").replace("/", ".")[:100]


def note_body(model: object, stream: object) -> None:
    """What the body says, for a request that may be refused before more is known."""
    mine = asked.get()
    if mine is not None:
        mine.model = model[:200] if isinstance(model, str) else ""
        mine.stream = stream is True


def note_answer(answer_id: str) -> None:
    """The answer has an id of its own."""
    mine = asked.get()
    if mine is not None:
        mine.answer_id = answer_id


def header_id() -> str:
    """The `x-request-id` of the task at hand, "" if there's none."""
    mine = asked.get()
    return mine.header_id if mine is not None else ""


def note_refusal(error: BaseException, mine: Asked | None = None) -> None:
    """It ended with an error. Nothing is kept of one that ran, or of whom nobody knows."""
    mine = mine or asked.get()
    if mine is None or mine.ran or mine.caller is None:
        return
    told = as_quire_error(error)
    if told.status == HTTPStatus.UNAUTHORIZED:
        return
    caller, code = mine.caller, str(told.code or "")
    kind = (caller.tenant_id, caller.key_id, mine.endpoint, told.status, code)
    keep_refusal(kind, lambda: _refused(mine, caller, told))


def _refused(mine: Asked, caller: Caller, told: QuireError) -> tuple[UsageRecord, RequestNote]:
    """What is kept of a request that was refused."""
    duration = time.perf_counter() - mine.received
    record = UsageRecord(
        request_id=f"refused-{secrets.token_hex(16)}",
        tenant_id=caller.tenant_id,
        key_id=caller.key_id,
        user_id=caller.user_id,
        endpoint=mine.endpoint,
        model=mine.model,
        prompt_tokens=0,
        completion_tokens=0,
        status=told.status,
        started_at=time.time() - duration,
        duration_ms=duration * 1000,
        stream=mine.stream,
    )
    note = RequestNote(
        header_id=mine.header_id,
        answer_id=mine.answer_id,
        code=str(told.code or ""),
        message=f"{told.param}: {told.message}" if told.param else told.message,
    )
    return record, note
