"""What operators do to models, by POST: through the catalogue's actions, and on to the page."""

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
from django.views.decorators.http import require_http_methods, require_POST

from catalog import actions
from catalog.checkpoint import read_checkpoint
from catalog.hub import ask_hub
from catalog.models import Replica, ServedModel
from console.deeds import text_of
from console.identity.recent import recent_authentication_required
from console.models_page import look
from console.models_page.form import ModelForm
from console.models_page.views import show_list, show_one
from engine.contract.errors import InvalidRequest, QuireError
from tenants.actors import as_actor, require_operator
from tenants.errors import NotFound
from tenants.shown_once import keep

Deed = Callable[[HttpRequest, ServedModel], str]


def deed(function: Deed) -> Callable[..., HttpResponse]:
    """A view by POST that does something to a model, then shows the page that says so."""

    @recent_authentication_required
    @require_POST
    @never_cache
    @login_required
    @wraps(function)
    def view(request: HttpRequest, pk: int) -> HttpResponse:
        found: ServedModel | None = None
        try:
            found = look.visible_model(request.user, pk)
            require_operator(as_actor(request.user))
            text = function(request, found)
        except QuireError as error:
            return show_list(request, error) if found is None else show_one(request, found, error)
        keep(request, text=text)
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


@recent_authentication_required
@require_http_methods(["GET", "HEAD", "POST"])
@never_cache
@login_required
def add(request: HttpRequest) -> HttpResponse:
    """A new model: its form, what it would need, and the load."""
    return _form(request, None)


@recent_authentication_required
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
        require_operator(as_actor(request.user))
    except QuireError as error:
        return show_list(request, error)
    if request.method != "POST":
        return _show_form(request, model, ModelForm.of(model))
    form = ModelForm.sent(request.POST, model)
    if "look" in request.POST or form.wrong:
        return _show_form(request, model, form, status=400 if form.wrong else 200)
    try:
        saved = form.save(request.user, model)
    except QuireError as error:
        form.take_error(error)
        return _show_form(request, model, form, status=error.status)
    loading = model is None or saved.desired_state == "loaded"
    text = "is being loaded." if model is None else "is changed."
    if model is not None and loading:
        text = "is changed. Replicas with changed settings restart, one at a time."
    keep(request, text=f"{saved.name} {text}")
    return redirect(reverse("model", args=[saved.pk]))


def _show_form(
    request: HttpRequest, model: ServedModel | None, form: ModelForm, status: int = 200
) -> HttpResponse:
    context: dict[str, Any] = {"model": model, "form": form, **_looked(request, form)}
    return render(request, "console/model_form.html", context, status=status)


def _looked(request: HttpRequest, form: ModelForm) -> dict[str, Any]:
    """What the source is and would need, where the form names one that is here."""
    source = text_of(request, "source") or form.values.get("source", "")
    if not source:
        return {}
    try:
        path = actions.check_source(source)
        checkpoint, found = look.checkpoint_of(path, form.engine_settings), None
        if checkpoint is None and look.is_on_hub(path):
            if "look" not in request.POST:
                return {"on_hub": path}
            found = ask_hub(path, form.engine_settings)
            checkpoint = found.checkpoint
        elif checkpoint is None:
            read_checkpoint(Path(path))
        if checkpoint is None:
            return {"on_hub": path, "download": found}
        need = look.need(checkpoint, form.engine_settings, request.POST or request.GET)
        return {"checkpoint": checkpoint, "need": need, "download": found}
    except QuireError as error:
        return {"need_error": error}
