"""The request log: writing and reading its rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

import msgspec
from django.db import connections, router, transaction
from django.db.models import Model, Q, QuerySet
from django.db.models.constants import OnConflict

from common.errors import NotFound
from engine.contract.errors import InvalidRequest
from metering.models import RequestContent, RequestEntry
from metering.money import NANOS, Rates
from metering.usage_record import UsageRecord, clean_text
from tenants.access import access_role, access_tenants
from tenants.actors import Actor, to_actor
from tenants.models import Role, Tenant, User

Reader = Actor | User
#: Prefix of refused requests' ids.
REFUSED = "refused-"
#: Status classes, as the filter spells them.
_CLASSES = {"2xx": (200, 300), "4xx": (400, 500), "5xx": (500, 600)}


def access_requests(user: Reader, tenant: Tenant | None = None) -> QuerySet[RequestEntry]:
    """Requests of one tenant, for its members, newest first.

    Without a tenant: those of all the user's tenants, and for an operator of all tenants. Raises
    `NotFound` for users who aren't members.
    """
    rows = RequestEntry.objects.select_related("tenant", "api_key", "user")
    if tenant is not None:
        access_role(user, tenant)
        return rows.filter(tenant=tenant)
    if to_actor(user).is_operator:
        return rows
    return rows.filter(tenant__in=access_tenants(user))


def of_status(rows: QuerySet[RequestEntry], status: str) -> QuerySet[RequestEntry]:
    """Filter by status: a number, "2xx", "4xx", "5xx" or "refused". Raises `InvalidRequest`."""
    if status == "refused":
        return rows.filter(request_id__startswith=REFUSED)
    if status in _CLASSES:
        first, last = _CLASSES[status]
        return rows.filter(status__gte=first, status__lt=last)
    if not status.isascii() or not status.isdigit() or len(status) > 3:
        raise InvalidRequest(
            f"status must be a number, 2xx, 4xx, 5xx or refused; got {status[:20]!r}.",
            param="status",
        )
    return rows.filter(status=int(status))


def access_request_entry(user: Reader, name: str) -> RequestEntry:
    """The request with this id, else the newest with this client id. Raises `NotFound`."""
    rows = access_requests(user).filter(called(name))
    # Clients choose header ids: one that equals another request's id must not hide that request.
    entry = rows.filter(request_id=_base_id(name)).first() or rows.first()
    if entry is None:
        raise NotFound("Request not found.", param="id")
    return entry


def access_content(user: Reader, entry: RequestEntry) -> RequestContent | None:
    """The stored prompt and output, if any: for admins, owners and the requesting user."""
    role, person = access_role(user, entry.tenant), to_actor(user).user
    is_requester = person is not None and entry.user_id == person.pk
    if role.rank < Role.ADMIN.rank and not is_requester:
        return None
    return RequestContent.objects.filter(
        request_id=entry.request_id, tenant_id=entry.tenant_id
    ).first()


def called(name: str) -> Q:
    """Filter by any id that a client may have seen, such as that of an attempt or a prompt."""
    name, base_id = clean_text(name.strip(), 200), _base_id(name)
    return Q(request_id=base_id) | Q(header_id=name) | Q(answer_id=base_id)


def _base_id(name: str) -> str:
    return clean_text(name.strip(), 200).partition("~")[0]


#: Maximum number of outputs, hops and points in time stored per request.
MAX_OUTPUTS, MAX_HOPS, MAX_POINTS = 8, 20, 64
#: Maximum number of characters of a refusal's reason.
MAX_REASON_CHARS = 500


class OutputTrace(msgspec.Struct, omit_defaults=True, kw_only=True):
    """An output's path through the engine; see `engine.contract.messages.FlightRecord`.

    Times are milliseconds; `chunks` and `preempted_at` count from the request's arrival at the
    replica. `chunks`: [time, tokens]. `drafted`: mean number of drafted tokens per step.
    """

    number: int = 0
    index: int = 0
    tokens: int = 0
    reason: str = ""
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    num_chunks: int = 0
    chunks: list[tuple[int, int]] = msgspec.field(default_factory=list)
    cached: int = 0
    cold: str = ""
    preemptions: int = 0
    preempted_at: list[int] = msgspec.field(default_factory=list)
    steps: int = 0
    drafts: int = 0
    accepted: int = 0
    drafted: float = 0.0
    ahead: int = 0
    ahead_own: int = 0
    behind: list[str] = msgspec.field(default_factory=list)


class MediaTrace(msgspec.Struct, omit_defaults=True, kw_only=True):
    """An image or audio file of a prompt; its content isn't stored.

    Attributes:
        digest: sha256 of the encoder's input, hexadecimal.
        tokens: number of its prompt tokens.
        size_bytes: size of the encoder's input.
    """

    kind: str
    digest: str
    tokens: int = 0
    size_bytes: int = 0


class PlacementEvent(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The request was sent to a replica, or withdrawn from it. `at_ms`: since its arrival."""

    at_ms: float
    replica: str
    reason: str = ""


class RequestTrace(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Details of a request that `UsageRecord` doesn't have.

    Attributes:
        header_id: its `x-request-id`, the client's or ours. answer_id: the id in the response, if
            it differs from the ledger's.
        code, message: of the error that refused or failed it.
        replica: the last one that ran it. rates: see `Rates`.
        limits: what remained of its limits at admission.
        tokens: [milliseconds since arrival, output tokens so far], over all outputs.
        asked: sampling parameters that differ from their defaults.
        media: of the first prompt.
    """

    header_id: str = ""
    answer_id: str = ""
    code: str = ""
    message: str = ""
    replica: str = ""
    numerics_changed: bool = False
    rates: tuple[int, ...] = ()
    limits: dict[str, int] = msgspec.field(default_factory=dict)
    asked: dict[str, Any] = msgspec.field(default_factory=dict)
    media: list[MediaTrace] = msgspec.field(default_factory=list)
    admitted_ms: float = 0.0
    hops: list[PlacementEvent] = msgspec.field(default_factory=list)
    outputs: list[OutputTrace] = msgspec.field(default_factory=list)
    tokens: list[tuple[int, int]] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        self.header_id = clean_text(self.header_id, 200)
        self.answer_id = clean_text(self.answer_id, 200)
        self.message = clean_text(self.message, MAX_REASON_CHARS)

    @property
    def first(self) -> OutputTrace:
        return self.outputs[0] if self.outputs else OutputTrace()


_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(RequestTrace)


def encode_trace(trace: RequestTrace) -> str:
    """Encode a trace for the database."""
    return _encode(trace).decode()


def decode_trace(text: str) -> RequestTrace:
    """Decode a stored trace; rows without one give an empty trace."""
    return _decoder.decode(text) if text else RequestTrace()


def request_detail_json(reader: Reader, entry: RequestEntry) -> dict[str, Any]:
    """Everything but the columns. Only operators see counts of other tenants' running requests."""
    trace = decode_trace(entry.detail)
    content = access_content(reader, entry)
    operator = to_actor(reader).is_operator
    return {
        "message": trace.message,
        "numerics_changed": trace.numerics_changed,
        "admitted_ms": trace.admitted_ms,
        "limits": trace.limits,
        "sampling": trace.asked,
        "media": msgspec.to_builtins(trace.media),
        "price": _price(trace),
        "hops": msgspec.to_builtins(trace.hops),
        "outputs": [_output(output, operator=operator) for output in trace.outputs],
        "tokens_over_time": trace.tokens,
        "content": None
        if content is None
        else {"prompt": content.prompt, "answer": content.answer},
    }


def _price(trace: RequestTrace) -> dict[str, str]:
    """Prices of a million tokens, of an image and of a minute of audio, in the currency."""
    rates = Rates(*trace.rates)
    prices = {
        **{name: getattr(rates, name) / 10**6 for name in ("input", "cached", "output")},
        **{name: getattr(rates, name) / NANOS for name in ("image", "audio_minute")},
    }
    return {name: f"{price:.6f}".rstrip("0").rstrip(".") for name, price in prices.items()}


def _output(trace: OutputTrace, *, operator: bool) -> dict[str, Any]:
    fields = {name: getattr(trace, name) for name in trace.__struct_fields__}
    tenant_ahead, everybody = fields.pop("ahead_own"), fields.pop("ahead")
    fields["ahead"] = {"own": tenant_ahead, "others": everybody > tenant_ahead}
    if operator:
        fields["ahead"]["num_others"] = everybody - tenant_ahead
    return fields


#: Maximum number of parameters per statement, within SQLite's limit.
VALUES = 900
_ENTRY = (
    *("request_id", "header_id", "answer_id", "tenant", "api_key", "user", "endpoint", "model"),
    *("adapter", "adapter_digest", "status", "code", "times", "finish_reason", "stream"),
    *("started_at", "duration_ms", "ttft_ms", "queue_ms", "prompt_tokens", "cached_tokens"),
    *("completion_tokens", "cost_nanos", "replica", "detail"),
)
_CONTENT = ("request_id", "tenant", "prompt", "answer", "at")


@dataclass(frozen=True, slots=True)
class RequestRow:
    """A request and its usage. `repeat_count`: as in `RequestEntry`."""

    record: UsageRecord
    trace: RequestTrace
    repeat_count: int = 1


@dataclass(frozen=True, slots=True)
class Content:
    """A request's prompt and output."""

    request_id: str
    tenant_id: int
    prompt: str
    answer: str
    at: datetime


def insert_rows(items: Sequence[RequestRow | Content]) -> None:
    """Write the rows in one transaction. Raises DatabaseError."""
    entries = [_entry(item) for item in items if isinstance(item, RequestRow)]
    contents = [_content(item) for item in items if isinstance(item, Content)]
    with transaction.atomic(router.db_for_write(RequestEntry)):
        _insert(RequestEntry, _ENTRY, entries)
        _insert(RequestContent, _CONTENT, contents)


def _entry(item: RequestRow) -> tuple[Any, ...]:
    record, trace = item.record, item.trace
    return (
        record.request_id,
        trace.header_id,
        trace.answer_id,
        record.tenant_id,
        record.key_id,
        record.user_id,
        record.endpoint,
        record.model,
        record.adapter,
        record.adapter_digest,
        record.status,
        trace.code[:60],
        item.repeat_count,
        record.finish_reason or "",
        record.stream,
        cast(datetime, record.started_at),
        record.duration_ms,
        record.ttft_ms,
        trace.first.queue_ms,
        record.prompt_tokens,
        record.cached_tokens,
        record.completion_tokens,
        record.cost_nanos,
        trace.replica[:200],
        encode_trace(trace),
    )


def _content(item: Content) -> tuple[Any, ...]:
    return item.request_id, item.tenant_id, item.prompt, item.answer, item.at


def _insert(model: type[Model], names: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> None:
    """`INSERT` that skips existing rows; `bulk_create` takes ten times as long."""
    connection = connections[router.db_for_write(model)]
    ops, meta = connection.ops, model._meta
    column_by_field = {field.name: str(field.column) for field in meta.concrete_fields}
    columns = ", ".join(ops.quote_name(column_by_field[name]) for name in names)
    row = f"({', '.join(['%s'] * len(names))})"
    insert = f"{ops.insert_statement(OnConflict.IGNORE)} {ops.quote_name(meta.db_table)}"
    suffix = ops.on_conflict_suffix_sql(meta.fields, OnConflict.IGNORE, [], [])
    adapt, values = ops.adapt_datetimefield_value, list(rows)
    with connection.cursor() as cursor:
        step = VALUES // len(names)
        for start in range(0, len(values), step):
            part = values[start : start + step]
            flat = [adapt(v) if isinstance(v, datetime) else v for value in part for v in value]
            cursor.execute(
                f"{insert} ({columns}) VALUES {', '.join([row] * len(part))} {suffix}", flat
            )
