"""The pages of models, and the JSON that keeps them live."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from catalog.hub import ask_hub
from catalog.models import DesiredState, ServedModel
from console.api import json_view
from console.models_page import look
from engine.contract.errors import QuireError
from tenants.access import access_tenants
from tenants.actors import as_actor, require_operator
from tenants.shown_once import take

MOST = 500


@require_safe
@never_cache
@login_required
def models(request: HttpRequest) -> HttpResponse:
    """The models that one may use; operators see the whole catalogue, and run it."""
    return show_list(request)


@require_safe
@never_cache
@login_required
def model(request: HttpRequest, pk: int) -> HttpResponse:
    """One model."""
    try:
        return show_one(request, look.visible_model(request.user, pk))
    except QuireError as error:
        return show_list(request, error)


@json_view
def states(request: HttpRequest) -> dict[str, Any]:
    """How each model is that the user may see, for a page that is open."""
    beats = look.heartbeats()
    found = look.visible_models(request.user).prefetch_related("replicas")[:MOST]
    return {"models": [_state(row, beats) for row in found]}


@json_view
def progress(request: HttpRequest) -> dict[str, Any]:
    """One model's replicas: their phases and ends are for operators."""
    row = look.visible_model(request.user, _pk(request))
    beats = look.heartbeats()
    found = _state(row, beats)
    if as_actor(request.user).is_operator:
        found["detail"] = look.replica_rows(row, beats)
    return found


@json_view
def log(request: HttpRequest) -> dict[str, Any]:
    """The end of a replica's log, or what came behind `?after=`. For operators."""
    require_operator(as_actor(request.user))
    row = look.visible_model(request.user, _pk(request))
    lines = look.log_of(row, request.GET.get("replica", ""), request.GET.get("after", ""))
    return {"lines": [{"id": line.id, "at": line.at, "text": line.text} for line in lines]}


def show_list(request: HttpRequest, error: QuireError | None = None) -> HttpResponse:
    """The list, with what was just done or refused."""
    user: Any = request.user
    operator, beats = as_actor(user).is_operator, look.heartbeats()
    found = list(look.visible_models(user).prefetch_related("replicas")[:MOST])
    context = {
        "rows": [_row(each, beats, operator) for each in found],
        "operator": operator,
        # Tenants whose news the page follows; the empty one stands for all.
        "followed": "" if operator else " ".join(each.slug for each in access_tenants(user)),
        "error": error,
        "told": take(request) if request.method == "GET" else {},
    }
    status = error.status if error else 200
    return render(request, "console/models.html", context, status=status)


def show_one(
    request: HttpRequest, found: ServedModel, error: QuireError | None = None
) -> HttpResponse:
    """A model's page, with what was just done or refused."""
    user: Any = request.user
    operator, beats = as_actor(user).is_operator, look.heartbeats()
    own = [beat for beat in beats if beat.model.name == found.name]
    context: dict[str, Any] = {
        "model": found,
        "row": _row(found, beats, operator),
        "operator": operator,
        "error": error,
        "told": take(request) if request.method == "GET" and error is None else {},
        "weights": look.weights_of(own),
        "live": own[0] if own else None,
    }
    if operator:
        replicas = look.replica_rows(found, beats)
        context |= {
            "replicas": replicas,
            "layers": look.layers_of(each["id"] for each in replicas),
            "in_force": sorted(found.settings.items()),
            **_need(request, found),
        }
    status = error.status if error else 200
    return render(request, "console/model.html", context, status=status)


def _need(request: HttpRequest, found: ServedModel) -> dict[str, Any]:
    checkpoint, download = look.checkpoint_of(found.source, found.settings), None
    try:
        if checkpoint is None and "hub" in request.GET and look.is_on_hub(found.source):
            download = ask_hub(found.source, found.settings)
            checkpoint = download.checkpoint
        need = checkpoint and look.need(checkpoint, found.settings, request.GET)
        return {"need": need, "need_error": None, "download": download}
    except QuireError as error:
        return {"need": None, "need_error": error}


def _pk(request: HttpRequest) -> int:
    text = request.GET.get("model", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 18 else 0


def _state(row: ServedModel, beats: list[Any]) -> dict[str, Any]:
    found = look.state_of(row, beats, row.replicas.all())
    return {
        "id": row.pk,
        "name": row.name,
        "state": found["state"],
        "load_progress": found["load_progress"],
        "replicas": found["replicas"],
    }


def _row(row: ServedModel, beats: list[Any], operator: bool) -> dict[str, Any]:
    live = next((beat for beat in beats if beat.model.name == row.name), None)
    checkpoint = look.checkpoint_of(row.source, row.settings)
    state = look.state_of(row, beats, row.replicas.all())
    loaded = live is not None and live.model.weights
    size = sum(each.nbytes for each in live.model.weights) if live and loaded else None
    quantization = row.settings.get("quantization") or (
        checkpoint.quantization if checkpoint else ""
    )
    return {
        "model": row,
        "state": state["state"],
        "load_progress": state["load_progress"],
        "num_live": state["replicas"],
        "wanted": row.num_replicas + row.num_spares,
        "architecture": checkpoint.architecture if checkpoint else "",
        "parameters": checkpoint.parameters if checkpoint and not checkpoint.quantization else None,
        "on_hub": look.is_on_hub(row.source),
        "stored": checkpoint.nbytes if checkpoint else None,
        "size": size,
        "quantization": quantization,
        "dtype": live.model.dtype if live else "",
        "context": row.max_model_len or state["context"],
        "loaded": row.desired_state == DesiredState.LOADED,
        "failed": _failure(row) if operator else "",
        "tasks": state["tasks"] or [],
    }


def _failure(row: ServedModel) -> str:
    """Why a replica failed, or how the last one ended."""
    for replica in row.replicas.all():
        if replica.state == "failed" and replica.detail:
            return str(replica.detail)
    return ""
