"""Live replicas: their configuration and load, from their heartbeats."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import redis
from django.conf import settings

from catalog.access import access_replicas, access_served_models
from catalog.heartbeats import read_heartbeats, registered_replicas
from catalog.models import DesiredState, Replica, ReplicaState, ServedModel
from catalog.replica_log import read_log
from common.messaging import ALL_TENANTS
from engine.contract.lora import TIERS
from engine.contract.messages import STALL_TIMEOUT_S, Heartbeat
from engine.system.redis_client import sync_client
from tenants.access import AccessSubject, access_tenant, access_tenants
from tenants.actors import to_actor
from tenants.models import Tenant

TIMEOUT_S = 2.0
#: Number of lines where only a log's end is shown.
TAIL_LINES = 20
#: States of a model's replicas from best to worst.
ORDER = ("ready", "draining", "loading", "sleeping", "stalled", "failed", "offline")
_FROM_ROW = {
    ReplicaState.PENDING: "loading",
    ReplicaState.LOADING: "loading",
    ReplicaState.FAILED: "failed",
}


@lru_cache(maxsize=4)
def client_of(url: str) -> redis.Redis:
    """A Redis client shared between threads."""
    return sync_client(url, timeout_s=TIMEOUT_S)


def live_replicas() -> list[Heartbeat]:
    """Replicas with a heartbeat, by id. Raises redis.RedisError."""
    client, prefix = client_of(settings.REDIS_URL), settings.QUIRE.key_prefix
    beats = read_heartbeats(client, prefix, sorted(registered_replicas(client, prefix)))
    return list(beats.values())


def log_tail(replica_id: str) -> str:
    """The last lines of a replica's log. Raises redis.RedisError."""
    client, prefix = client_of(settings.REDIS_URL), settings.QUIRE.key_prefix
    return "\n".join(
        line.text for line in read_log(client, prefix, replica_id, max_lines=TAIL_LINES)
    )


def state_of(beat: Heartbeat) -> str:
    """The heartbeat's state, or "stalled": the process is alive, but its engine makes no steps."""
    if beat.state == "ready" and beat.at - beat.progress_at > STALL_TIMEOUT_S:
        return "stalled"
    return beat.state if beat.state in ORDER else "failed"


def model_state(beats: Iterable[Heartbeat], rows: Iterable[Replica]) -> dict[str, Any]:
    """A model's state: that of its best replica, by heartbeats, or else by rows.

    Returns: {"state", "load_progress" in [0, 1], "replicas" (live ones), "context" (tokens),
    "tasks" and "max_images" of a request (0: the model takes none)}. The last three are None until
    a replica has reported them.
    """
    live = list(beats)
    tasks = live[0].model.tasks if live else None
    max_images = live[0].model.max_images if live and live[0].model.sees else 0
    states = [state_of(beat) for beat in live]
    # Rows cover replicas without a heartbeat: those still to be started, and dead ones.
    states += [_FROM_ROW[ReplicaState(row.state)] for row in rows if row.state in _FROM_ROW]
    loading = [beat.load_progress for beat in live if beat.state == "loading"]
    return {
        "state": min(states, key=ORDER.index, default="offline"),
        "load_progress": max(loading, default=0.0),
        "replicas": len(live),
        "context": max((beat.model.max_model_len for beat in live), default=None),
        "tasks": tasks,
        "max_images": max_images if tasks else None,
    }


@dataclass(frozen=True, slots=True)
class KVTier:
    """A replica's KV tier.

    Attributes:
        hit_tokens: prompt tokens loaded from it.
        evicted_tokens: additional prompt tokens that a tier of 4 times its capacity would have had.
        saved_seconds: compute time saved by loading them.
    """

    replica_id: str
    name: str
    used_bytes: int
    capacity_bytes: int
    hit_tokens: int
    evicted_tokens: int
    saved_seconds: float


def tiers_of(beat: Heartbeat) -> list[KVTier]:
    """A replica's KV tiers by name."""
    stats = beat.stats
    return [
        KVTier(
            beat.replica_id,
            name,
            used_bytes,
            stats.kv_tier_capacity_bytes.get(name, 0),
            stats.kv_tier_hit_tokens_total.get(name, 0),
            stats.kv_tier_evicted_tokens_total.get(name, 0),
            stats.kv_tier_saved_seconds_total.get(name, 0.0),
        )
        for name, used_bytes in sorted(stats.kv_tier_bytes.items())
    ]


def replica_figures(beat: Heartbeat, *, operator: bool) -> dict[str, Any]:
    """A replica's load as JSON.

    Its host, its error and its cache's contents are for operators alone: tenants share the cache.
    """
    stats = beat.stats
    figures = {
        "id": beat.replica_id,
        "model": beat.model.name,
        "state": state_of(beat),
        "incarnation": beat.incarnation,
        "at": beat.at,
        "load_progress": beat.load_progress,
        "dtype": beat.model.dtype,
        "quantization": beat.model.quantization,
        "num_ranks": beat.model.num_ranks,
        "max_model_len": beat.model.max_model_len,
        "kv_capacity_tokens": beat.model.kv_capacity_tokens,
        "running": stats.num_requests_running,
        "waiting": stats.num_requests_waiting,
        "kv_usage": stats.kv_cache_usage_perc,
        "num_blocks": stats.num_blocks,
        "preemptions": stats.num_preemptions_total,
        "prompt_tokens": stats.prompt_tokens_total,
        "generation_tokens": stats.generation_tokens_total,
        "steps": stats.steps_total,
        "last_step_ms": stats.last_step_ms,
    }
    if operator:
        figures |= {
            "host": beat.host,
            "pid": beat.pid,
            "detail": beat.detail,
            "num_free_blocks": stats.num_free_blocks,
            "num_cached_blocks": stats.num_cached_blocks,
            "prefix_queries": stats.prefix_cache_queries_total,
            "prefix_hits": stats.prefix_cache_hits_total,
            "drafts": stats.spec_decode_num_drafts_total,
            "draft_tokens": stats.spec_decode_num_draft_tokens_total,
            "accepted_tokens": stats.spec_decode_num_accepted_tokens_total,
        }
    return figures


def now(tenant_id: int) -> dict[str, Any]:
    """The models that a tenant may use, and their replicas; for operators all, with hosts."""
    if tenant_id == ALL_TENANTS:
        return snapshot(
            list(ServedModel.objects.all()),
            list(Replica.objects.select_related("served_model")),
            operator=True,
        )
    tenant = Tenant.objects.get(pk=tenant_id)
    served = list(access_served_models(tenant))
    return snapshot(served, list(access_replicas(tenant)), operator=False)


def snapshot(served: list[ServedModel], rows: list[Replica], *, operator: bool) -> dict[str, Any]:
    """Models with their states, live replicas with their load. Raises redis.RedisError."""
    names = {model.name for model in served}
    beats = live_replicas()
    if not operator:
        beats = [beat for beat in beats if beat.model.name in names]
    states = states_of(names, beats, rows)
    failures = {"failures": failures_of(beats, rows)} if operator else {}
    return failures | {
        "at": time.time(),
        "models": [_card(model, states[model.name]) for model in served],
        "replicas": [replica_figures(beat, operator=operator) for beat in beats],
    }


def states_of(
    names: Iterable[str], beats: Iterable[Heartbeat], rows: Iterable[Replica]
) -> dict[str, dict[str, Any]]:
    """`model_state` by model name."""
    by_name: dict[str, list[Heartbeat]] = defaultdict(list)
    for beat in beats:
        by_name[beat.model.name].append(beat)
    rows_by_name: dict[str, list[Replica]] = defaultdict(list)
    for row in rows:
        rows_by_name[row.served_model.name].append(row)
    return {name: model_state(by_name[name], rows_by_name[name]) for name in names}


def _card(model: ServedModel, state: dict[str, Any]) -> dict[str, Any]:
    loaded = model.desired_state == DesiredState.LOADED
    if not loaded and state["state"] == "offline":
        state = {**state, "state": "unloaded"}
    return {"id": model.name, **state, "max_model_len": model.max_model_len or state["context"]}


def failures_of(beats: Iterable[Heartbeat], rows: Iterable[Replica]) -> list[dict[str, str]]:
    """Failed replicas with their errors and the ends of their logs.

    Live ones report the error themselves; for the others their supervisor does.
    """
    beats = list(beats)
    alive = {beat.replica_id for beat in beats}
    failures = [
        (beat.replica_id, beat.model.name, beat.detail)
        for beat in beats
        if state_of(beat) in ("failed", "stalled")
    ]
    failures += [
        (row.replica_id, row.served_model.name, row.detail)
        for row in rows
        if row.state == ReplicaState.FAILED and row.replica_id not in alive
    ]
    return [
        {"id": replica_id, "model": model, "detail": detail, "log": log_tail(replica_id)}
        for replica_id, model, detail in failures
    ]


def overview_of(reader: AccessSubject, tenant: str | None) -> dict[str, Any]:
    """The overview that the user may see. Raises `NotFound` for other tenants, redis.RedisError."""
    if tenant:
        return now(access_tenant(reader, tenant).pk)
    operator = to_actor(reader).is_operator
    served, rows = _visible(reader, operator)
    return snapshot(served, rows, operator=operator)


def _visible(user: AccessSubject, operator: bool) -> tuple[list[ServedModel], list[Replica]]:
    """The models and replica rows that the user may see."""
    if operator:
        return list(ServedModel.objects.all()), list(Replica.objects.select_related("served_model"))
    served, rows = ServedModel.objects.none(), Replica.objects.none()
    for tenant in access_tenants(user):
        served = served | access_served_models(tenant)
        rows = rows | access_replicas(tenant)
    return list(served.distinct()), list(rows.distinct())


TIER_ORDER: dict[str, int] = {tier: index for index, tier in enumerate(TIERS)}


def residency(
    beats: Iterable[Heartbeat], digests: Iterable[str], *, operator: bool
) -> dict[str, list[dict[str, Any]]]:
    """Return {digest: [an adapter's state on each replica]}, the fastest tier first.

    Restricted to `digests`, since others belong to other tenants. Only operators see replicas' ids;
    others see numbers.
    """
    requested = set(digests)
    by_digest: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for number, beat in enumerate(sorted(beats, key=lambda beat: beat.replica_id), 1):
        for state in beat.adapters:
            if state.digest in requested:
                by_digest[state.digest].append(
                    {
                        "replica": beat.replica_id if operator else f"replica {number}",
                        "tier": state.tier,
                        "bytes": state.num_bytes,
                        "pinned": state.pinned,
                        "running": state.num_running,
                        "waiting": state.num_waiting,
                        "load_seconds": round(state.load_seconds, 4),
                    }
                )
    for rows in by_digest.values():
        rows.sort(key=lambda row: (TIER_ORDER.get(row["tier"], len(TIER_ORDER)), row["replica"]))
    return dict(by_digest)
