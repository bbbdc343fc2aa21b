"""History: from what gateways count to the points of a page."""

from __future__ import annotations

import json
from typing import Any

import pytest
import redis

from catalog.heartbeats import registered_replicas
from engine.contract import messages as protocol
from engine.contract import redis_keys
from history.buckets import (
    FIRST_TOKEN,
    GAP,
    GRACE_S,
    LAST_BUCKET,
    MIN_WIDTH_S,
    RANGES,
    RETENTION_BY_WIDTH,
    add_counts,
    bucket_index,
    bucket_key,
    index_key,
    percentile,
)
from history.models import PoolSample, TrafficSample
from history.read import (
    MAX_GROUPS,
    TrafficQuery,
    group_traffic,
    percentiles,
    pools,
    time_points,
    traffic,
)
from history.write import delete_expired, write_history
from tests.console.beats import heartbeat

pytestmark = [pytest.mark.django_db, pytest.mark.database]
#: On the beginning of a bucket of every width.
NOW = 1_800_000_000 // 7200 * 7200


@pytest.fixture
def client(live_redis: str) -> Any:
    client = redis.Redis.from_url(live_redis)
    yield client
    client.close()


def counted(client: Any, prefix: str, timestamp: float, tenant: int = 7, **counts: int) -> None:
    """What a gateway adds."""
    pipeline = client.pipeline()
    series = (tenant, "quill", "")
    add_counts(pipeline, {(series, name): n for name, n in counts.items()}, timestamp, prefix)
    pipeline.execute()


def test_gateways_add_up_and_a_bucket_is_written_once(client: Any, key_prefix: str) -> None:
    for now in (NOW, NOW + 3, NOW + 9.9):
        counted(client, key_prefix, now, requests=1, prompt_tokens=10, **{f"{FIRST_TOKEN}20": 1})
    assert write_history(client, NOW + MIN_WIDTH_S + GRACE_S - 1) == []
    saved = client.hgetall(bucket_key(NOW, key_prefix))
    assert write_history(client, NOW + MIN_WIDTH_S + GRACE_S + 1) == [NOW]
    # A worker that died between the database and Redis: another writes the same again.
    client.hset(bucket_key(NOW, key_prefix), mapping=saved)
    client.zadd(index_key(key_prefix), {str(NOW): NOW})
    write_history(client, NOW + 2 * MIN_WIDTH_S)
    rows = TrafficSample.objects.filter(width=MIN_WIDTH_S).order_by("tenant_id")
    assert [(r.tenant_id, r.requests, r.prompt_tokens) for r in rows] == [(0, 3, 30), (7, 3, 30)]
    assert rows[0].first_token == {"20": 3}
    assert client.exists(bucket_key(NOW, key_prefix)) == 0


def test_tenants_add_up_to_the_installations_line(client: Any, key_prefix: str) -> None:
    counted(client, key_prefix, NOW, tenant=7, requests=2, errors=1)
    counted(client, key_prefix, NOW, tenant=8, requests=3, refused=4)
    write_history(client, NOW + 25)
    times = time_points(RANGES["5m"], NOW + 25)
    full = traffic(TrafficQuery(range=RANGES["5m"]), times)
    one = traffic(TrafficQuery(range=RANGES["5m"], tenants=[8]), times)
    assert (sum(full.sums["requests"]), sum(full.sums["errors"])) == (5, 1)
    assert (sum(one.sums["requests"]), sum(one.sums["refused"])) == (3, 4)
    assert full.sums["requests"][times.index(NOW)] == 5
    by_tenant = group_traffic(TrafficQuery(range=RANGES["5m"]), "tenant_id", times)
    assert {tenant: sum(line["requests"]) for tenant, line in by_tenant.items()} == {7: 2, 8: 3}


@pytest.mark.parametrize("name", list(RANGES))
def test_every_range_tells_the_same_sums_whatever_is_wide_already(
    client: Any, key_prefix: str, name: str
) -> None:
    chosen_range = RANGES[name]
    now = NOW
    begin = now - min(chosen_range.seconds, 1700)
    for index in range(begin, now, 50):
        counted(client, key_prefix, index, requests=1, **{f"{GAP}{index % 7}": 2})
        write_history(client, index + MIN_WIDTH_S + GRACE_S + 1)
    write_history(client, now + MIN_WIDTH_S + GRACE_S + 1)
    line = traffic(TrafficQuery(range=chosen_range), time_points(chosen_range, now + 25))
    seen = sum(line.sums["requests"])
    expected = len(
        [
            index
            for index in range(begin, now, 50)
            if index >= time_points(chosen_range, now + 25)[0]
        ]
    )
    assert seen == expected
    assert sum(sum(gap.values()) for gap in line.gaps) == 2 * expected


def test_pools_tell_cache_from_use_and_from_nothing(client: Any, key_prefix: str) -> None:
    stats = {"num_blocks": 100, "num_free_blocks": 70, "num_cached_blocks": 80}
    stats |= {"num_requests_running": 3, "num_requests_waiting": 2}
    for name in ("one", "two"):
        beat = heartbeat(name, "quill", stats=stats)
        client.sadd(redis_keys.replicas_key(key_prefix), name)
        client.set(redis_keys.replica_key(name, key_prefix), protocol.encode(beat))
    assert len(registered_replicas(client, key_prefix)) == 2
    write_history(client, NOW)
    series = pools(TrafficQuery(range=RANGES["5m"]), time_points(RANGES["5m"], NOW + 25))
    last = {name: values[-1] for name, values in series.items()}
    # 30 of each are in use; 80 are cached, of which 50 by nobody else.
    assert last == {
        "replicas": 2,
        "running": 6,
        "waiting": 4,
        "blocks": 200,
        "active_blocks": 60,
        "cached_blocks": 100,
    }
    assert series["blocks"][0] is None


def test_what_is_old_goes_width_by_width(client: Any, key_prefix: str) -> None:
    counted(client, key_prefix, NOW, requests=1)
    write_history(client, NOW + 3 * 7200)
    widths = {row.width for row in TrafficSample.objects.all()}
    assert widths == set(RETENTION_BY_WIDTH)
    delete_expired(NOW + RETENTION_BY_WIDTH[10] + 1)
    assert {row.width for row in TrafficSample.objects.all()} == {60, 600, 7200}
    delete_expired(NOW + RETENTION_BY_WIDTH[7200] + 1)
    assert not TrafficSample.objects.exists()
    assert not PoolSample.objects.exists()


def test_many_groups_are_bounded(client: Any, key_prefix: str) -> None:
    for tenant in range(1, MAX_GROUPS + 5):
        counted(client, key_prefix, NOW, tenant=tenant, requests=tenant)
    write_history(client, NOW + 25)
    series_by_group = group_traffic(
        TrafficQuery(range=RANGES["5m"]), "tenant_id", time_points(RANGES["5m"], NOW + 25)
    )
    assert len(series_by_group) == MAX_GROUPS + 1
    assert sum(series_by_group[None]["requests"]) == 1 + 2 + 3 + 4


def test_redis_keeps_a_bounded_time_while_no_worker_writes(client: Any, key_prefix: str) -> None:
    counted(client, key_prefix, NOW, requests=1)
    assert 0 < client.ttl(bucket_key(NOW, key_prefix)) <= RETENTION_BY_WIDTH[MIN_WIDTH_S]
    assert json.loads(next(iter(client.hgetall(bucket_key(NOW, key_prefix))))) == [
        *(7, "quill", "", "requests")
    ]


def test_percentiles_of_merged_spreads_are_near_the_true_ones() -> None:
    durations = [0.0007 * 1.01**n for n in range(1000)]
    spread: dict[int, int] = {}
    for duration in durations:
        spread[bucket_index(duration)] = spread.get(bucket_index(duration), 0) + 1
    for fraction in (0.5, 0.95, 0.99):
        true = durations[int(fraction * len(durations))]
        assert percentile(spread, fraction) == pytest.approx(true, rel=0.1)
    assert percentile({}, 0.5) is None
    assert percentiles([{}])["p50"] == [None]


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e-9, 1e9])
def test_odd_durations_have_a_place(seconds: float) -> None:
    assert 0 <= bucket_index(seconds) <= LAST_BUCKET
