"""What models and replicas do right now: the topic `now`, and what a page asks for as it opens."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from catalog.access import access_replicas, access_served_models
from catalog.models import DesiredState, Replica, ReplicaState, ServedModel
from console.replicas import live_replicas, log_tail, model_state, replica_figures, state_of
from engine.contract.protocol import Heartbeat
from tenants.live import ALL
from tenants.models import Tenant


def now(tenant_id: int) -> dict[str, Any]:
    """The models that a tenant may use, and their replicas; for operators all, with hosts."""
    if tenant_id == ALL:
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
    """Replicas that failed, why, and the end of their logs.

    Those that beat say why themselves, of the others their supervisor does.
    """
    beats = list(beats)
    alive = {beat.replica_id for beat in beats}
    found = [
        (beat.replica_id, beat.model.name, beat.detail)
        for beat in beats
        if state_of(beat) in ("failed", "stalled")
    ]
    found += [
        (row.replica_id, row.served_model.name, row.detail)
        for row in rows
        if row.state == ReplicaState.FAILED and row.replica_id not in alive
    ]
    return [
        {"id": replica_id, "model": model, "detail": detail, "log": log_tail(replica_id)}
        for replica_id, model, detail in found
    ]
