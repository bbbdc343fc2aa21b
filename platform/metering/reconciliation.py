"""The ledger held against what the engine's replicas have counted themselves."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import redis
from django.conf import settings
from django.db.models import Sum

from engine.contract.protocol import written_key
from metering.accounts import SUMS, parts_of, since_key, sums_key
from metering.gateways import gateways_key, open_key
from metering.models import UsageEntry
from metering.records import UsageRecord, decode_record
from metering.settlement import spool_key
from tenants.models import Tenant

logger = logging.getLogger(__name__)

#: Sums of days before are forgotten; no ledger is kept for less.
MOST_DAYS = 35
#: Requests are on their way while one looks: a difference must be there at each look.
LOOKS, PAUSE_S = 3, 1.0
#: Ids of one query.
PART = 500
#: A request's id without what the engine and a second gateway put behind it.
_SUFFIX = re.compile(r"(-\d+)?(\.\d+)?$")


@dataclass
class Line:
    """Tokens of one tenant and model: [prompt, output]."""

    tenant: str
    model: str
    engine: list[int] = field(default_factory=lambda: [0, 0])
    unbilled: list[int] = field(default_factory=lambda: [0, 0])
    ledger: list[int] = field(default_factory=lambda: [0, 0])

    @property
    def difference(self) -> list[int]:
        """What the ledger has too much."""
        parts = zip(self.ledger, self.unbilled, self.engine, strict=True)
        return [ledger + unbilled - engine for ledger, unbilled, engine in parts]


@dataclass
class Findings:
    """What a comparison found.

    Attributes:
        since: of requests that came from then on; None: no gateway has run yet.
        running: requests that aren't settled yet. lost: ids of those that nobody will settle.
    """

    since: datetime | None
    lines: list[Line]
    running: int = 0
    lost: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether nothing differs."""
        return not self.lost and not any(any(line.difference) for line in self.lines)


def reconcile(client: redis.Redis, days: int = 2, looks: int = LOOKS) -> Findings:
    """Compare the last days, today among them. May block."""
    found = _look(client, days)
    for _ in range(looks - 1):
        if found.exact:
            break
        time.sleep(PAUSE_S)
        again = _look(client, days)
        again.lost = [name for name in again.lost if name in set(found.lost)]
        found = again
    return found


def tidy(client: redis.Redis, lost: Iterable[str] = ()) -> None:
    """Forget sums that are older than any comparison or an erased tenant's, and what is lost."""
    oldest = f"{datetime.now(UTC) - timedelta(days=MOST_DAYS + 5):%Y-%m-%d}"
    erased = set(Tenant.objects.exclude(erased_at=None).values_list("pk", flat=True))
    old = []
    for name in (name.decode() for name in client.hkeys(sums_key())):
        day, tenant_id, _, _ = parts_of(name)
        if day < oldest or tenant_id in erased:
            old.append(name)
    if old:
        client.hdel(sums_key(), *old)
    written = written_key(settings.QUIRE["KEY_PREFIX"])
    gone = set(lost)
    if fields := [f for f in client.hkeys(written) if _request_of(f) in gone]:
        client.hdel(written, *fields)


def _look(client: redis.Redis, days: int) -> Findings:
    pipe = client.pipeline(transaction=True)
    pipe.get(since_key())
    pipe.hgetall(sums_key())
    pipe.xrange(spool_key())
    began, sums, spooled = pipe.execute()
    if began is None:
        return Findings(None, [])
    now = datetime.now(UTC)
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    since = max(datetime.fromtimestamp(int(began), UTC), midnight - timedelta(days=days - 1))
    lines: dict[tuple[int, str], Line] = {}
    # Of a tenant that is erased the ledger has nothing any more.
    slugs = dict(Tenant.objects.filter(erased_at=None).values_list("pk", "slug"))

    def line(tenant_id: int, model: str) -> Line:
        if (tenant_id, model) not in lines:
            lines[tenant_id, model] = Line(slugs.get(tenant_id, ""), model)
        return lines[tenant_id, model]

    for name, count in sums.items():
        day, tenant_id, what, model = parts_of(name.decode())
        if day >= f"{since:%Y-%m-%d}":
            kind, unbilled = divmod(SUMS.index(what), 2)
            of = line(tenant_id, model)
            (of.unbilled if unbilled else of.engine)[kind] += int(count)
    waiting = {record.request_id: record for record in _records(spooled)}
    for tenant_id, model, prompt, output in _ledger(since, now, waiting):
        ledger = line(tenant_id, model).ledger
        ledger[0] += prompt
        ledger[1] += output
    ordered = [lines[place] for place in sorted(lines) if place[0] in slugs]
    running, lost = _left_open(client, set(waiting))
    return Findings(since, ordered, running, lost)


def _records(entries: Iterable[tuple[bytes, dict[bytes, bytes]]]) -> Iterator[UsageRecord]:
    for _, fields in entries:
        try:
            yield decode_record(fields[b"r"])
        except (msgspec.DecodeError, msgspec.ValidationError, KeyError):
            continue  # the drainer sets it apart


def _ledger(
    since: datetime, until: datetime, waiting: dict[str, UsageRecord]
) -> Iterator[tuple[int, str, int, int]]:
    """(tenant, model, prompt, output): rows until a moment, with those that waited then, each once.

    What waited may be in the ledger by now, or has been before and only wasn't acknowledged.
    """
    rows = UsageEntry.objects.filter(started_at__gte=since, recorded_at__lte=until)
    sums = rows.order_by().values_list("tenant_id", "model")
    yield from sums.annotate(Sum("prompt_tokens"), Sum("completion_tokens"))
    there: set[str] = set()
    for part in _parts(waiting):
        there.update(rows.filter(request_id__in=part).values_list("request_id", flat=True))
    for name, record in waiting.items():
        started: Any = record.started_at
        if name not in there and started >= since:
            yield record.tenant_id, record.model, record.prompt_tokens, record.completion_tokens


def _left_open(client: redis.Redis, waiting: set[str]) -> tuple[int, list[str]]:
    """(how many run, which are lost) of what the engine wrote and nobody has settled.

    What it wrote after a request was settled, until the abort reached it, is forgotten here.
    """
    written = written_key(settings.QUIRE["KEY_PREFIX"])
    fields = client.hkeys(written)
    names = {_request_of(name) for name in fields}
    running: set[str] = set()
    for gateway in client.zrange(gateways_key(), 0, -1):
        running.update(
            _SUFFIX.sub("", n.decode()) for n in client.hkeys(open_key(gateway.decode()))
        )
    settled = names & waiting
    for part in _parts(names - running - waiting):
        found = UsageEntry.objects.filter(request_id__in=part)
        settled.update(found.values_list("request_id", flat=True))
    if late := [name for name in fields if _request_of(name) in settled - running]:
        client.hdel(written, *late)
    return len(names & running), sorted(names - running - settled)


def _request_of(name: bytes) -> str:
    return _SUFFIX.sub("", name.decode().rpartition("/")[0])


def _parts(values: Iterable[str]) -> Iterator[list[str]]:
    ordered = list(values)
    return (ordered[start : start + PART] for start in range(0, len(ordered), PART))
