"""Data of the model pages: catalogue rows, replicas, memory needs, logs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import redis
from django.conf import settings
from django.db.models import QuerySet

from catalog import live_status
from catalog.access import access_catalog, access_served_models
from catalog.checkpoint import Checkpoint, read_checkpoint
from catalog.hub import downloaded
from catalog.live_status import client_of, live_replicas, model_state
from catalog.models import DesiredState, Replica, ReplicaState, ServedModel
from catalog.replica_log import LogLine, read_log
from catalog.sizing import MemoryEstimate, estimate_memory
from common.errors import NotFound
from engine.contract import redis_keys, replica_state
from engine.contract.errors import InvalidRequest, QuireError
from engine.contract.messages import Heartbeat
from engine.contract.replica_state import LayerReport
from tenants.access import access_tenants
from tenants.actors import to_actor
from tenants.models import User

PHASES = {
    replica_state.DOWNLOADING: "Downloading",
    replica_state.KERNELS: "Building kernels",
    replica_state.READING: "Reading and converting weights",
    replica_state.CACHE: "Laying out the KV cache",
    replica_state.WARM_UP: "Warming up",
}
MAX_LAYERS = 2000
MAX_SEQUENCES = 1 << 20
MAX_CONTEXT_TOKENS = 1 << 31
_layers = msgspec.json.Decoder(list[LayerReport])


def visible_models(user: User) -> QuerySet[ServedModel]:
    """All models for operators; for others their tenants' models, including public ones."""
    if to_actor(user).is_operator:
        return access_catalog(user)
    models = ServedModel.objects.none()
    for tenant in access_tenants(user).filter(active=True):
        models = models | access_served_models(tenant)
    return models.distinct()


def visible_model(user: User, pk: int) -> ServedModel:
    """Raises `NotFound` if it doesn't exist or the user has no access."""
    model = visible_models(user).filter(pk=pk).first()
    if model is None:
        raise NotFound("Model not found.")
    return model


def get_heartbeats() -> list[Heartbeat]:
    """Heartbeats of all replicas; none while Redis is unreachable."""
    try:
        return live_replicas()
    except redis.RedisError:
        return []


def state_of(
    model: ServedModel, beats: Iterable[Heartbeat], rows: Iterable[Replica]
) -> dict[str, Any]:
    """`model_state`, and "unloaded" or "idle" for models that shouldn't run now."""
    live_state = model_state([beat for beat in beats if beat.model.name == model.name], rows)
    if live_state["state"] == "offline" and model.desired_state == DesiredState.UNLOADED:
        live_state["state"] = "unloaded"
    elif live_state["state"] == "offline" and (
        model.idle_since is not None or model.scales_from_zero
    ):
        live_state["state"] = "idle"
    return live_state


def is_on_hub(source: str) -> bool:
    """Whether a catalogue source is a hub id: folders are stored as absolute paths."""
    return not source.startswith("/")


def checkpoint_of(source: str, model_settings: Mapping[str, Any]) -> Checkpoint | None:
    """The checkpoint of a source on this host, if it is present, else None."""
    try:
        path = downloaded(source, model_settings) if is_on_hub(source) else Path(source)
        if path is None:
            return None
        changed = path.stat().st_mtime_ns
        if path.is_dir():
            changed += sum(
                file.stat().st_mtime_ns
                for name in ("config.json", "model.safetensors", "model.safetensors.index.json")
                if (file := path / name).is_file()
            )
        return _checkpoint(str(path), changed)
    except (OSError, QuireError):
        return None


@lru_cache(maxsize=256)
def _checkpoint(source: str, changed: int) -> Checkpoint:
    return read_checkpoint(Path(source))


def estimate_memory_for_form(
    checkpoint: Checkpoint, model_settings: dict[str, Any], asked: Any
) -> MemoryEstimate:
    """Estimate memory for a form's values. Raises `InvalidRequest` with the field."""
    sequences = query_int(asked, "sequences", 1, MAX_SEQUENCES)
    context = query_int(asked, "context", 0, MAX_CONTEXT_TOKENS)
    return estimate_memory(checkpoint, model_settings, sequences=sequences, context=context)


def query_int(asked: Any, name: str, default: int, high: int) -> int:
    text = str(asked.get(name, "") or "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:12]) <= high:
        raise InvalidRequest(f"{name} must be a whole number from 1 to {high}.", param=name)
    return int(text)


def replica_status_list(model: ServedModel, beats: Iterable[Heartbeat]) -> list[dict[str, Any]]:
    """A model's replicas: rows, with heartbeats of live ones. For operators."""
    live = {beat.replica_id: beat for beat in beats if beat.model.name == model.name}
    rows = list(model.replicas.all())
    statuses = [replica_row(row, live.pop(row.replica_id, None)) for row in rows]
    return statuses + [replica_row(None, beat) for beat in live.values()]


def replica_row(row: Replica | None, beat: Heartbeat | None) -> dict[str, Any]:
    """A replica as JSON."""
    state = "offline"
    if beat is not None:
        state = live_status.state_of(beat)
    elif row is not None:
        state = row.state
    phase = beat.loading if beat is not None else None
    return {
        "id": beat.replica_id if beat is not None else row.replica_id if row is not None else "",
        "pk": row.pk if row is not None else None,
        "state": state,
        "detail": (beat.detail if beat is not None else "") or (row.detail if row else ""),
        "host": (row.host if row else "") or (beat.host if beat else ""),
        "pid": (row.pid if row else None) or (beat.pid if beat else None),
        "restarts": row.restarts if row is not None else 0,
        "last_exit": row.last_exit if row is not None else "",
        "phase": PHASES.get(phase.phase, "") if phase is not None else "",
        "bytes_done": phase.done if phase is not None else 0,
        "bytes_total": phase.total if phase is not None else 0,
        "load_progress": beat.load_progress if beat is not None else 0.0,
        "num_ranks": beat.model.num_ranks if beat is not None else 1,
        "collective_seconds": beat.stats.collective_seconds_total if beat is not None else 0.0,
        "resident": beat.process.resident_bytes if beat is not None else 0,
        "restartable": row is not None and row.state == ReplicaState.READY,
    }


def weights_of(beats: Iterable[Heartbeat]) -> list[dict[str, Any]]:
    """The load report's summary from the first replica that has one."""
    for beat in beats:
        if beat.model.weights:
            return [
                {
                    "format": weight.format,
                    "level": weight.level,
                    "layers": weight.layers,
                    "nbytes": weight.nbytes,
                    "error": weight.error,
                }
                for weight in beat.model.weights
            ]
    return []


def layers_of(replica_ids: Iterable[str]) -> list[LayerReport]:
    """The load report by layer from the first of these replicas that has one."""
    prefix = settings.QUIRE.key_prefix
    for replica_id in replica_ids:
        try:
            data: Any = client_of(settings.REDIS_URL).get(
                redis_keys.load_report_key(replica_id, prefix)
            )
            if data is not None:
                return _layers.decode(data)[:MAX_LAYERS]
        except (redis.RedisError, msgspec.DecodeError, msgspec.ValidationError):
            continue
    return []


def log_of(model: ServedModel, replica_id: str, after: str) -> list[LogLine]:
    """The end of a replica's log. Raises `NotFound`, `InvalidRequest`, redis.RedisError."""
    replica_ids = {row["id"] for row in replica_status_list(model, get_heartbeats())}
    if replica_id not in replica_ids:
        raise NotFound("Replica not found.", param="replica")
    if after and not all(part.isdigit() for part in after.split("-", 1)):
        raise InvalidRequest("after must be a line's id.", param="after")
    prefix = settings.QUIRE.key_prefix
    return read_log(
        client_of(settings.REDIS_URL), prefix, replica_id, after=after[:64], max_lines=500
    )
