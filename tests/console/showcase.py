"""A tenant whose pages have something to show: run as a process of its own, after `seed`.

Northwind Press is owned by nora; milo is its member. What they did is made up, but for what the
test that looks at all pages asks of a real engine. Its last line is JSON: a key's "secret", and the
values of both "sessions"' cookies by name.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")

import django

DAY_S = 86_400
#: Of the tenants, by slug: how much they ask, and when in the day.
SHARES = {"northwind": (1.0, 0.0), "acme": (0.6, 2.0), "rival": (0.3, 4.0)}


def main() -> None:
    """Make the rows."""
    django.setup()
    from tenants.models import Tenant
    from tests.console.seed import logged_in

    secret = people()
    tenants = {slug: Tenant.objects.get(slug=slug) for slug in SHARES}
    money(tenants["northwind"])
    usage(tenants)
    history(tenants)
    sessions = {name: logged_in(name) for name in ("nora", "milo")}
    print(json.dumps({"secret": secret, "sessions": sessions}))


def people() -> str:
    """Tenant, people, keys, an invitation; the secret of one key."""
    from tenants import actions
    from tenants.actors import SYSTEM_ACTOR
    from tenants.models import Role, User

    nora = User.objects.create_user("nora", "nora@example.org")
    milo = User.objects.create_user("milo", "milo@example.org")
    nora.password = milo.password = User.objects.get(username="ada").password
    nora.save()
    milo.save()
    limits: dict[str, Any] = {
        "weight": 2.0,
        "tokens_per_minute": 200_000,
        "max_running_requests": 24,
    }
    press = actions.create_tenant(actor=SYSTEM_ACTOR, name="Northwind", owner=nora, **limits)
    actions.add_member(actor=SYSTEM_ACTOR, tenant=press, user=milo, role=Role.MEMBER)
    actions.invite(actor=nora, tenant=press, email="ines@example.org", role=Role.VIEWER)
    actions.create_service_account(actor=nora, tenant=press, name="nightly-digest")
    actions.create_key(actor=milo, tenant=press, name="editor plug-in", requests_per_minute=120)
    return str(actions.create_key(actor=nora, tenant=press, name="website").secret)


def money(press: Any) -> None:
    """A price and a budget."""
    from metering import actions
    from tenants.actors import SYSTEM_ACTOR

    actions.set_price(
        actor=SYSTEM_ACTOR,
        model="quill",
        input_per_million="0.40",
        cached_per_million="0.10",
        output_per_million="1.60",
    )
    actions.set_budget(
        actor=SYSTEM_ACTOR, tenant=press, period="month", amount="250", alert_percent=80
    )


def usage(tenants: dict[str, Any]) -> None:
    """Two weeks of it."""
    from metering.ledger import insert_records
    from metering.usage_record import UsageRecord

    now = datetime.now(UTC)
    insert_records(
        [
            UsageRecord(
                request_id=f"shown-{slug}-{day}-{part}",
                tenant_id=tenant.pk,
                endpoint="chat",
                model="quill",
                prompt_tokens=int(share * wave(day) * 210_000),
                cached_tokens=int(share * wave(day) * 120_000),
                completion_tokens=int(share * wave(day + part) * 90_000),
                cost_nanos=int(share * wave(day) * 190_000_000),
                status=200,
                duration_ms=840.0,
                started_at=now - timedelta(days=day, minutes=7 * part),
            )
            for slug, (share, _) in SHARES.items()
            for tenant in [tenants[slug]]
            for day in range(14)
            for part in range(3)
        ]
    )


def history(tenants: dict[str, Any]) -> None:
    """Traffic and pools of a day, finely of the last two hours."""
    from history.models import PoolSample, TrafficSample

    rows, pools = [], []
    for width, start in buckets():
        hour = start % DAY_S / 3600
        loads = {slug: share * wave(hour + late) for slug, (share, late) in SHARES.items()}
        full = [traffic(width, start, 0, sum(loads.values()))]
        rows += full + [
            traffic(width, start, tenants[slug].pk, load) for slug, load in loads.items()
        ]
        active_blocks = 200 + 130 * wave(hour)
        pools.append(
            PoolSample(
                width=width,
                start=start,
                model="quill",
                replicas=1,
                running=5 * wave(hour),
                waiting=max(0.0, 3 * wave(hour) - 4),
                blocks=640,
                active_blocks=active_blocks * 0.6,
                cached_blocks=active_blocks * 0.7,
            )
        )
    TrafficSample.objects.bulk_create(rows)
    PoolSample.objects.bulk_create(pools)


def buckets() -> Iterator[tuple[int, int]]:
    """(width, start) of all that is kept of the last day."""
    now = int(time.time())
    for width, retention_s in ((10, 7200), (60, 26 * 3600), (600, DAY_S)):
        yield from (
            (width, index) for index in range(now // width * width - retention_s, now, width)
        )


def wave(hour: float) -> float:
    """How busy it is: from 0.4 to 2, with some unrest."""
    return 1.2 + 0.5 * math.sin(hour / 24 * math.tau) + 0.3 * math.sin(hour * 17)


def traffic(width: int, start: int, tenant: int, load: float) -> Any:
    """One bucket of one tenant's; tenant 0 is all together."""
    from history.buckets import bucket_index
    from history.models import TrafficSample

    requests = max(1, round(load * width / 5))
    return TrafficSample(
        width=width,
        start=start,
        tenant_id=tenant,
        model="quill",
        requests=requests,
        errors=int(start // width % 31 == 0),
        refused=int(start // width % 13 == 0),
        prompt_tokens=requests * 380,
        cached_tokens=requests * 210,
        completion_tokens=requests * 140,
        first_token={bucket_index(0.05 + 0.04 * load): requests, bucket_index(0.4): 1},
        gaps={bucket_index(0.011): requests * 130, bucket_index(0.03): requests * 9},
    )


if __name__ == "__main__":
    main()
