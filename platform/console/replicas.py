"""Live replicas, from their heartbeats: what they are and what they do right now."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import redis
from django.conf import settings

from catalog.heartbeats import known_replicas, read_heartbeats
from catalog.models import Replica, ReplicaState
from catalog.replica_log import read_log
from engine.contract.protocol import STALL_AFTER_S, Heartbeat
from engine.contract.redis_clients import sync_client

TIMEOUT_S = 2.0
#: Of a log, where only its end is shown.
TAIL_LINES = 20
#: From the best that a model's replicas can be to the worst.
ORDER = ("ready", "draining", "loading", "sleeping", "stalled", "failed", "offline")
_FROM_ROW = {
    ReplicaState.PENDING: "loading",
    ReplicaState.LOADING: "loading",
    ReplicaState.FAILED: "failed",
}


@lru_cache(maxsize=4)
def client_of(url: str) -> redis.Redis:
    """A client whose connections threads share."""
    return sync_client(url, timeout_s=TIMEOUT_S)


def live_replicas() -> list[Heartbeat]:
    """Every replica with a heartbeat, by id. Raises redis.RedisError."""
    client, prefix = client_of(settings.REDIS_URL), settings.QUIRE["KEY_PREFIX"]
    beats = read_heartbeats(client, prefix, sorted(known_replicas(client, prefix)))
    return list(beats.values())


def log_tail(replica_id: str) -> str:
    """The last lines of a replica's log. Raises redis.RedisError."""
    client, prefix = client_of(settings.REDIS_URL), settings.QUIRE["KEY_PREFIX"]
    return "\n".join(line.text for line in read_log(client, prefix, replica_id, most=TAIL_LINES))


def state_of(beat: Heartbeat) -> str:
    """The heartbeat's state, or "stalled": the process beats, but its engine does not move."""
    if beat.state == "ready" and beat.at - beat.progress_at > STALL_AFTER_S:
        return "stalled"
    return beat.state if beat.state in ORDER else "failed"


def model_state(beats: Iterable[Heartbeat], rows: Iterable[Replica]) -> dict[str, Any]:
    """How a model is: the state of its best replica, by heartbeats and, failing those, by rows.

    Returns: {"state", "load_progress" in [0, 1], "replicas" (live ones), "context" (tokens) and
    "tasks", both None while no replica has said it}.
    """
    live = list(beats)
    states = [state_of(beat) for beat in live]
    # Rows speak of replicas that don't beat: those still to be started, and those that died.
    states += [_FROM_ROW[ReplicaState(row.state)] for row in rows if row.state in _FROM_ROW]
    loading = [beat.load_progress for beat in live if beat.state == "loading"]
    return {
        "state": min(states, key=ORDER.index, default="offline"),
        "load_progress": max(loading, default=0.0),
        "replicas": len(live),
        "context": max((beat.model.max_model_len for beat in live), default=None),
        "tasks": live[0].model.tasks if live else None,
    }


def replica_figures(beat: Heartbeat, *, operator: bool) -> dict[str, Any]:
    """A replica's load as JSON. Where it runs, why it failed and what its cache holds is
    for operators alone: the cache is everybody's.
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
