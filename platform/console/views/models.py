"""The pages of models, and the JSON that keeps them live."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from accounts.reauthentication import reauthentication_required
from catalog import actions
from catalog import model_details as look
from catalog.checkpoint import read_checkpoint
from catalog.hub import get_download_info
from catalog.models import DesiredState, Replica, ServedModel
from common.errors import NotFound
from common.one_time import pop_one_time, store_one_time
from console.views.base import json_view, post_text
from console.views.model_forms import ServedModelForm
from engine.contract.errors import InvalidRequest, QuireError
from tenants.access import access_tenants
from tenants.actors import require_operator, to_actor

MAX_ROWS = 500


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
    beats = look.get_heartbeats()
    found = look.visible_models(request.user).prefetch_related("replicas")[:MAX_ROWS]
    return {"models": [_state(row, beats) for row in found]}


@json_view
def progress(request: HttpRequest) -> dict[str, Any]:
    """One model's replicas: their phases and ends are for operators."""
    row = look.visible_model(request.user, _pk(request))
    beats = look.get_heartbeats()
    found = _state(row, beats)
    if to_actor(request.user).is_operator:
        found["detail"] = look.replica_status_list(row, beats)
    return found


@json_view
def log(request: HttpRequest) -> dict[str, Any]:
    """The end of a replica's log, or what came behind `?after=`. For operators."""
    require_operator(to_actor(request.user))
    row = look.visible_model(request.user, _pk(request))
    lines = look.log_of(row, request.GET.get("replica", ""), request.GET.get("after", ""))
    return {"lines": [{"id": line.id, "at": line.at, "text": line.text} for line in lines]}


def show_list(request: HttpRequest, error: QuireError | None = None) -> HttpResponse:
    """The list, with what was just done or refused."""
    user: Any = request.user
    operator, beats = to_actor(user).is_operator, look.get_heartbeats()
    found = list(look.visible_models(user).prefetch_related("replicas")[:MAX_ROWS])
    context = {
        "rows": [_row(each, beats, operator) for each in found],
        "operator": operator,
        # Tenants whose news the page follows; the empty one stands for all.
        "followed": "" if operator else " ".join(each.slug for each in access_tenants(user)),
        "error": error,
        "told": pop_one_time(request) if request.method == "GET" else {},
    }
    status = error.status if error else 200
    return render(request, "console/models.html", context, status=status)


def show_one(
    request: HttpRequest, found: ServedModel, error: QuireError | None = None
) -> HttpResponse:
    """A model's page, with what was just done or refused."""
    user: Any = request.user
    operator, beats = to_actor(user).is_operator, look.get_heartbeats()
    own = [beat for beat in beats if beat.model.name == found.name]
    context: dict[str, Any] = {
        "model": found,
        "row": _row(found, beats, operator),
        "operator": operator,
        "error": error,
        "told": pop_one_time(request) if request.method == "GET" and error is None else {},
        "weights": look.weights_of(own),
        "live": own[0] if own else None,
    }
    if operator:
        replicas = look.replica_status_list(found, beats)
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
            download = get_download_info(found.source, found.settings)
            checkpoint = download.checkpoint
        need = checkpoint and look.estimate_memory_for_form(checkpoint, found.settings, request.GET)
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


# -- What operators do to models, by POST: through the catalogue's actions, and on to the page.


Deed = Callable[[HttpRequest, ServedModel], str]


def deed(function: Deed) -> Callable[..., HttpResponse]:
    """A view by POST that does something to a model, then shows the page that says so."""

    @reauthentication_required
    @require_POST
    @never_cache
    @login_required
    @wraps(function)
    def view(request: HttpRequest, pk: int) -> HttpResponse:
        found: ServedModel | None = None
        try:
            found = look.visible_model(request.user, pk)
            require_operator(to_actor(request.user))
            text = function(request, found)
        except QuireError as error:
            return show_list(request, error) if found is None else show_one(request, found, error)
        store_one_time(request, text=text)
        gone = not ServedModel.objects.filter(pk=pk).exists()
        return redirect("models") if gone else redirect("model", pk)

    return view


@deed
def load(request: HttpRequest, model: ServedModel) -> str:
    """Have it served."""
    actions.load_model(actor=request.user, name=model.name)
    return f"{model.name} is being loaded."


@deed
def unload(request: HttpRequest, model: ServedModel) -> str:
    """Let its replicas finish, then end."""
    actions.unload_model(actor=request.user, model=model)
    return f"{model.name} drains: its replicas finish their requests, then stop."


@deed
def sleep(request: HttpRequest, model: ServedModel) -> str:
    """Give its memory back for a while."""
    level = request.POST.get("level", "1")
    if level not in ("1", "2"):
        raise InvalidRequest("level must be 1 or 2.", param="level")
    actions.sleep_model(actor=request.user, model=model, level=int(level))
    return f"{model.name} is going to sleep."


@deed
def wake(request: HttpRequest, model: ServedModel) -> str:
    """Take its memory again."""
    actions.wake_model(actor=request.user, model=model)
    return f"{model.name} is waking up."


@deed
def delete(request: HttpRequest, model: ServedModel) -> str:
    """Out of the catalogue."""
    name = model.name
    actions.delete_model(actor=request.user, model=model)
    return f"{name} is removed from the catalogue. Its files are kept."


@deed
def restart(request: HttpRequest, model: ServedModel) -> str:
    """One replica finishes what it has, ends, and starts anew."""
    name = request.POST.get("replica", "")
    replica = Replica.objects.filter(served_model=model, replica_id=name).first()
    if replica is None:
        raise NotFound("Replica not found.", param="replica")
    actions.drain_replica(actor=request.user, replica=replica)
    return f"{replica.replica_id} finishes its requests and restarts."


@reauthentication_required
@require_http_methods(["GET", "HEAD", "POST"])
@never_cache
@login_required
def add(request: HttpRequest) -> HttpResponse:
    """A new model: its form, what it would need, and the load."""
    return _form(request, None)


@reauthentication_required
@require_http_methods(["GET", "HEAD", "POST"])
@never_cache
@login_required
def change(request: HttpRequest, pk: int) -> HttpResponse:
    """A model's settings."""
    try:
        return _form(request, look.visible_model(request.user, pk))
    except QuireError as error:
        return show_list(request, error)


def _form(request: HttpRequest, model: ServedModel | None) -> HttpResponse:
    try:
        require_operator(to_actor(request.user))
    except QuireError as error:
        return show_list(request, error)
    if request.method != "POST":
        return _show_form(request, model, ServedModelForm.of(model))
    form = ServedModelForm.from_post(request.POST, model)
    if "look" in request.POST or form.has_errors:
        return _show_form(request, model, form, status=400 if form.has_errors else 200)
    try:
        saved = form.save(request.user, model)
    except QuireError as error:
        form.add_error(error)
        return _show_form(request, model, form, status=error.status)
    loading = model is None or saved.desired_state == "loaded"
    text = "is being loaded." if model is None else "is changed."
    if model is not None and loading:
        text = "is changed. Replicas with changed settings restart, one at a time."
    store_one_time(request, text=f"{saved.name} {text}")
    return redirect(reverse("model", args=[saved.pk]))


def _show_form(
    request: HttpRequest, model: ServedModel | None, form: ServedModelForm, status: int = 200
) -> HttpResponse:
    context: dict[str, Any] = {"model": model, "form": form, **_looked(request, form)}
    return render(request, "console/model_form.html", context, status=status)


def _looked(request: HttpRequest, form: ServedModelForm) -> dict[str, Any]:
    """What the source is and would need, where the form names one that is here."""
    source = post_text(request, "source") or form.values.get("source", "")
    if not source:
        return {}
    try:
        path = actions.check_source(source)
        checkpoint, found = look.checkpoint_of(path, form.engine_settings), None
        if checkpoint is None and look.is_on_hub(path):
            if "look" not in request.POST:
                return {"on_hub": path}
            found = get_download_info(path, form.engine_settings)
            checkpoint = found.checkpoint
        elif checkpoint is None:
            read_checkpoint(Path(path))
        if checkpoint is None:
            return {"on_hub": path, "download": found}
        need = look.estimate_memory_for_form(
            checkpoint, form.engine_settings, request.POST or request.GET
        )
        return {"checkpoint": checkpoint, "need": need, "download": found}
    except QuireError as error:
        return {"need_error": error}
