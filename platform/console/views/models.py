"""Model pages, their live JSON, and operators' actions on models."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any

from django.db import transaction
from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone

from catalog import actions, model_details
from catalog.checkpoint import Checkpoint, read_checkpoint
from catalog.hub import get_download_info, search_hub
from catalog.live_status import tiers_of
from catalog.models import DesiredState, Replica, ServedModel
from catalog.suggestions import SUGGESTIONS
from common.errors import NotFound
from common.one_time import pop_one_time, store_one_time
from console.mounting import mounted
from console.views.base import change_view, form_view, json_view, page_view, post_int, post_text
from console.views.benchmark_chart import benchmark_context, parse_levels
from console.views.model_forms import ServedModelForm
from console.views.request_summary import summarize_speed, summarize_speed_by_model
from engine.contract.errors import InvalidRequest, QuireError
from history.benchmarks import (
    access_benchmark,
    access_benchmarks,
    start_benchmark,
    stop_benchmark,
)
from inference.api.benchmarks import enqueue_benchmark
from metering.access import last_used_days
from metering.request_log import access_requests
from tenants.access import access_tenants
from tenants.actors import require_operator, to_actor
from tenants.models import User
from tenants.sessions import UserRequest

MAX_ROWS = 500
#: Maximum age of the requests that a model's figures are computed from.
FIGURES_SPAN = timedelta(hours=24)
STATE_WORDS = {"offline": "no replica", "stalled": "not responding"}


@page_view
def models(request: UserRequest) -> HttpResponse:
    """List the models available to the user; operators see and manage the whole catalogue."""
    return show_list(request)


@page_view
def model(request: UserRequest, pk: int) -> HttpResponse:
    try:
        return show_one(request, model_details.visible_model(request.user, pk))
    except QuireError as error:
        return show_list(request, error)


@json_view
def states(request: UserRequest) -> dict[str, Any]:
    """States of the visible models, polled by an open page."""
    beats = model_details.get_heartbeats()
    rows = model_details.visible_models(request.user).prefetch_related("replicas")[:MAX_ROWS]
    states = [_state(row, beats) for row in rows]
    return {"models": states, "verdict": _verdict(states)}


@json_view
def progress(request: UserRequest) -> dict[str, Any]:
    """One model's state; operators also get its replicas' load phases and last exits."""
    row = model_details.visible_model(request.user, _pk(request))
    beats = model_details.get_heartbeats()
    status = _state(row, beats)
    if to_actor(request.user).is_operator:
        status["detail"] = model_details.replica_status_list(row, beats)
        run = access_benchmarks(request.user, row).first()
        status["benchmark"] = run.progress if run is not None and run.is_open else ""
    return status


@json_view
def log(request: UserRequest) -> dict[str, Any]:
    """The tail of a replica's log, or the lines after `?after=`. Operators only."""
    require_operator(request.user)
    row = model_details.visible_model(request.user, _pk(request))
    lines = model_details.log_of(row, request.GET.get("replica", ""), request.GET.get("after", ""))
    return {"lines": [{"id": line.id, "at": line.at, "text": line.text} for line in lines]}


def show_list(request: UserRequest, error: QuireError | None = None) -> HttpResponse:
    """Render the list with the last outcome or error."""
    user = request.user
    operator, beats = to_actor(user).is_operator, model_details.get_heartbeats()
    rows = list(model_details.visible_models(user).prefetch_related("replicas")[:MAX_ROWS])
    last_day = access_requests(user).filter(started_at__gte=timezone.now() - FIGURES_SPAN)
    figures, used_days = summarize_speed_by_model(last_day), last_used_days(user)
    listed = [
        _row(row, beats, operator)
        | {"figures": figures.get(row.name), "last_used": used_days.get(row.name)}
        for row in sorted(rows, key=lambda row: row.desired_state != DesiredState.LOADED)
    ]
    context = {
        "rows": listed,
        "verdict": _verdict(listed),
        "num_sampled": sum(speed.requests for speed in figures.values()),
        "is_partial": any(speed.is_partial for speed in figures.values()),
        "operator": operator,
        "followed": _followed(user),
        "error": error,
        "outcome": pop_one_time(request) if request.method == "GET" else {},
    }
    status = error.status if error else 200
    return render(request, "console/models.html", context, status=status)


def _followed(user: User) -> str:
    """Slugs of the tenants whose topics a page follows; "" stands for all tenants together."""
    if to_actor(user).is_operator:
        return ""
    return " ".join(tenant.slug for tenant in access_tenants(user))


def show_one(
    request: UserRequest, model: ServedModel, error: QuireError | None = None
) -> HttpResponse:
    """Render a model's page with the last outcome or error."""
    user = request.user
    operator, beats = to_actor(user).is_operator, model_details.get_heartbeats()
    model_beats = [beat for beat in beats if beat.model.name == model.name]
    context: dict[str, Any] = {
        "model": model,
        "row": _row(model, beats, operator),
        "operator": operator,
        "error": error,
        "outcome": pop_one_time(request) if request.method == "GET" and error is None else {},
        "weights": model_details.weights_of(model_beats),
        "live": model_beats[0] if model_beats else None,
        "followed": _followed(user),
        "figures": summarize_speed(
            access_requests(user).filter(
                model=model.name, started_at__gte=timezone.now() - FIGURES_SPAN
            )
        ),
        "base_url": request.build_absolute_uri(mounted("/v1")),
    }
    if operator:
        replicas = model_details.replica_status_list(model, beats)
        context |= {
            **benchmark_context(user, model),
            "replicas": replicas,
            "tiers": [tier for beat in model_beats for tier in tiers_of(beat)],
            "layers": model_details.layers_of(replica["id"] for replica in replicas),
            "in_force": sorted(model.settings.items()),
            **_need(request, model),
        }
    status = error.status if error else 200
    return render(request, "console/model.html", context, status=status)


def _need(request: UserRequest, model: ServedModel) -> dict[str, Any]:
    checkpoint, download = model_details.checkpoint_of(model.source, model.settings), None
    try:
        if checkpoint is None and "hub" in request.GET and model_details.is_on_hub(model.source):
            download = get_download_info(model.source, model.settings)
            checkpoint = download.checkpoint
        need = checkpoint and model_details.estimate_memory_for_form(
            checkpoint, model.settings, request.GET
        )
        return {"need": need, "need_error": None, "download": download}
    except QuireError as error:
        return {"need": None, "need_error": error}


def _pk(request: UserRequest) -> int:
    text = request.GET.get("model", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 18 else 0


def _state(row: ServedModel, beats: list[Any]) -> dict[str, Any]:
    """A model's state, its load and, unless it is ready, the time since which it isn't."""
    replicas = row.replicas.all()
    live = [beat for beat in beats if beat.model.name == row.name]
    state = model_details.state_of(row, live, replicas)
    times = [replica.last_ready_at for replica in replicas if replica.last_ready_at]
    return state | {
        "id": row.pk,
        "name": row.name,
        "loaded": row.desired_state == DesiredState.LOADED,
        "since": None if state["state"] == "ready" else max([row.changed_at, *times]),
        "running": sum(beat.stats.num_requests_running for beat in live),
        "waiting": sum(beat.stats.num_requests_waiting for beat in live),
    }


def _verdict(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether all loaded models are served, in one line, and which ones aren't.

    Models that intentionally aren't served, asleep or scaled to zero, are only counted.
    """
    paused = {"idle": "idle", "sleeping": "asleep"}
    loaded = [state for state in states if state["loaded"] and state["state"] not in paused]
    problems = [state for state in loaded if state["state"] != "ready"]
    if not loaded:
        text = "No model is serving"
    elif problems:
        text = f"{len(problems)} of {len(loaded)} loaded models {_be(problems)} not serving"
    elif len(loaded) == 1:
        text = f"{loaded[0]['name']} is serving"
    else:
        text = f"All {len(loaded)} loaded models are serving"
    counts = Counter(state["state"] for state in states)
    for name, word in paused.items():
        if counts[name]:
            text += f", {counts[name]} {word}"
    return {
        "text": f"{text}.",
        "tone": _tone(problems),
        "problems": [
            {
                "name": state["name"],
                "url": reverse("model", args=[state["id"]]),
                "state": STATE_WORDS.get(state["state"], state["state"]),
                "since": state["since"],
            }
            for state in problems
        ],
    }


def _be(things: list[Any]) -> str:
    return "is" if len(things) == 1 else "are"


def _tone(problems: list[dict[str, Any]]) -> str:
    """The notice's CSS class: models that are only loading or draining are no error."""
    if any(state["state"] not in ("loading", "draining") for state in problems):
        return "error"
    return "warning" if problems else "success"


def _row(row: ServedModel, beats: list[Any], operator: bool) -> dict[str, Any]:
    live = next((beat for beat in beats if beat.model.name == row.name), None)
    checkpoint = model_details.checkpoint_of(row.source, row.settings)
    state = _state(row, beats)
    loaded = live is not None and live.model.weights
    size = sum(weight.nbytes for weight in live.model.weights) if live and loaded else None
    quantization = row.settings.get("quantization") or (
        checkpoint.quantization if checkpoint else ""
    )
    return state | {
        "model": row,
        "num_live": state["replicas"],
        "wanted": row.num_replicas + row.num_spares,
        "architecture": checkpoint.architecture if checkpoint else "",
        "parameters": checkpoint.parameters if checkpoint and not checkpoint.quantization else None,
        "on_hub": model_details.is_on_hub(row.source),
        "stored": checkpoint.nbytes if checkpoint else None,
        "size": size,
        "quantization": quantization,
        "dtype": live.model.dtype if live else "",
        "context": row.max_model_len or state["context"] or _context_of(checkpoint),
        "failed": _failure(row) if operator else "",
        "tasks": state["tasks"] or [],
        "media": live.model.media if live else [],
    }


def _context_of(checkpoint: Checkpoint | None) -> int:
    """A checkpoint's context length in tokens; 0 if unknown."""
    return checkpoint.shape.context if checkpoint and checkpoint.shape else 0


def _failure(row: ServedModel) -> str:
    """Failure detail of the first failed replica; "" if none failed."""
    for replica in row.replicas.all():
        if replica.state == "failed" and replica.detail:
            return str(replica.detail)
    return ""


Action = Callable[[UserRequest, ServedModel], str]


def post_action(function: Action) -> Callable[..., HttpResponseBase]:
    """Turn an operator's action on a model into a POST view that redirects to its page."""

    @change_view
    @wraps(function)
    def view(request: UserRequest, pk: int) -> HttpResponse:
        model: ServedModel | None = None
        try:
            model = model_details.visible_model(request.user, pk)
            require_operator(request.user)
            text = function(request, model)
        except QuireError as error:
            return show_list(request, error) if model is None else show_one(request, model, error)
        store_one_time(request, text=text)
        exists = ServedModel.objects.filter(pk=pk).exists()
        return redirect("model", pk) if exists else redirect("models")

    return view


@post_action
def load(request: UserRequest, model: ServedModel) -> str:
    actions.load_model(actor=request.user, name=model.name)
    return f"{model.name} is being loaded."


@post_action
def unload(request: UserRequest, model: ServedModel) -> str:
    """Drain and stop the model's replicas."""
    actions.unload_model(actor=request.user, model=model)
    return f"{model.name} drains: its replicas finish their requests, then stop."


@post_action
def sleep(request: UserRequest, model: ServedModel) -> str:
    """Put the model to sleep to free its memory."""
    level = request.POST.get("level", "1")
    if level not in ("1", "2"):
        raise InvalidRequest("level must be 1 or 2.", param="level")
    actions.sleep_model(actor=request.user, model=model, level=int(level))
    return f"{model.name} is going to sleep."


@post_action
def wake(request: UserRequest, model: ServedModel) -> str:
    actions.wake_model(actor=request.user, model=model)
    return f"{model.name} is waking up."


@post_action
def delete(request: UserRequest, model: ServedModel) -> str:
    """Remove the model from the catalogue."""
    name = model.name
    actions.delete_model(actor=request.user, model=model)
    return f"{name} is removed from the catalogue. Its files are kept."


@post_action
def restart(request: UserRequest, model: ServedModel) -> str:
    """Drain and restart one replica."""
    name = request.POST.get("replica", "")
    replica = Replica.objects.filter(served_model=model, replica_id=name).first()
    if replica is None:
        raise NotFound("Replica not found.", param="replica")
    actions.drain_replica(actor=request.user, replica=replica)
    return f"{replica.replica_id} finishes its requests and restarts."


@post_action
def run_benchmark(request: UserRequest, model: ServedModel) -> str:
    values: dict[str, int] = {}
    for name in ("input_tokens", "output_tokens", "num_requests"):
        if (value := post_int(request, name)) is None:
            raise InvalidRequest(f"{name} is missing.", param=name)
        values[name] = value
    levels = parse_levels(request.POST.get("levels", ""))
    run = start_benchmark(actor=request.user, model=model, levels=levels, **values)
    transaction.on_commit(lambda: enqueue_benchmark(run.public_id))
    return f"A benchmark of {model.name} is starting."


@post_action
def end_benchmark(request: UserRequest, model: ServedModel) -> str:
    run = access_benchmark(request.user, model, request.POST.get("benchmark", ""))
    stop_benchmark(actor=request.user, run=run)
    return "The benchmark is stopped. What it has measured stays."


@form_view
def add(request: UserRequest) -> HttpResponse:
    """Add and load a new model."""
    return _form(request, None)


@form_view
def change(request: UserRequest, pk: int) -> HttpResponse:
    """Change a model's settings."""
    try:
        return _form(request, model_details.visible_model(request.user, pk))
    except QuireError as error:
        return show_list(request, error)


def _form(request: UserRequest, model: ServedModel | None) -> HttpResponse:
    try:
        require_operator(request.user)
    except QuireError as error:
        return show_list(request, error)
    if request.method != "POST":
        form = ServedModelForm.of(model)
        if model is None:  # the link of a suggestion fills these fields in
            form.values |= {name: request.GET.get(name, "") for name in ("source", "name")}
        return _show_form(request, model, form)
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
    request: UserRequest,
    model: ServedModel | None,
    form: ServedModelForm,
    status: int = 200,
) -> HttpResponse:
    context: dict[str, Any] = {
        "model": model,
        "form": form,
        "suggestions": SUGGESTIONS if model is None else (),
        "host": socket.gethostname(),
        **_source_context(request, form),
        **(_search_context(request) if model is None else {}),
    }
    return render(request, "console/model_form.html", context, status=status)


def _search_context(request: UserRequest) -> dict[str, Any]:
    """Template context: the hub's models that match `?q=`."""
    query = request.GET.get("q", "").strip()
    if not query:
        return {}
    try:
        return {"query": query, "results": search_hub(query)}
    except QuireError as error:
        return {"query": query, "search_error": error}


def _source_context(request: UserRequest, form: ServedModelForm) -> dict[str, Any]:
    """Template context: the checkpoint of the form's source and its memory estimate."""
    source = post_text(request, "source") or form.values.get("source", "")
    if not source:
        return {}
    try:
        path = actions.check_source(source)
        checkpoint, download = model_details.checkpoint_of(path, form.engine_settings), None
        if checkpoint is None and model_details.is_on_hub(path):
            if "look" not in request.POST:
                return {"on_hub": path}
            download = get_download_info(path, form.engine_settings)
            checkpoint = download.checkpoint
        elif checkpoint is None:
            read_checkpoint(Path(path))
        if checkpoint is None:
            return {"on_hub": path, "download": download}
        need = model_details.estimate_memory_for_form(
            checkpoint, form.engine_settings, request.POST or request.GET
        )
        return {"checkpoint": checkpoint, "need": need, "download": download}
    except QuireError as error:
        return {"need_error": error}
