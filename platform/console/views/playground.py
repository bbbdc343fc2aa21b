"""The playground's page, its saved conversations as JSON, and its sampling settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from django.conf import settings
from django.http import HttpResponse, JsonResponse
from django.shortcuts import render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from console.mounting import mounted
from console.views.base import page_view, require_tenant
from console.views.batches import write_caller
from engine.contract.errors import InvalidRequest, QuireError
from engine.contract.sampling_params import MAX_STOP, MAX_STOP_CHARS
from inference.errors import PayloadTooLarge, error_response
from inference.web.json_body import parse_object
from storage import actions
from storage.access import (
    MAX_LISTED,
    access_conversation,
    access_conversations,
    access_folders,
    access_preset,
    access_presets,
)
from storage.actions.files import lifetime
from storage.models import PlaygroundPreset, SavedConversation
from tenants.access import access_role
from tenants.authentication import AuthenticationFailed
from tenants.models import Role, User
from tenants.sessions import UserRequest

Answer = Callable[..., dict[str, Any]]
View = Callable[..., HttpResponse]


def json_action(*methods: str) -> Callable[[Answer], View]:
    """Turn a function that returns a dict into a JSON view; 401 without a logged-in user."""

    def decorate(function: Answer) -> View:
        @require_http_methods(methods)
        @never_cache
        @wraps(function)
        def view(request: UserRequest, **kwargs: Any) -> HttpResponse:
            try:
                if not request.user.is_authenticated:
                    raise AuthenticationFailed("Log in first.", code="not_logged_in")
                return JsonResponse(function(request, **kwargs))
            except QuireError as error:
                return error_response(error)

        return view

    return decorate


@json_action("GET", "POST")
def conversations(request: UserRequest) -> dict[str, Any]:
    """The user's conversations in `?tenant=` that match `?q=`, before `?before=`; POST creates."""
    user = request.user
    tenant = require_tenant(request)
    if request.method == "POST":
        created = actions.create_conversation(
            actor=user, tenant=tenant, document=_body(request, "document")["document"]
        )
        return to_json(created, user)
    search, cursor, folder = (request.GET.get(name, "") for name in ("q", "before", "folder"))
    rows = access_conversations(user, tenant, search, cursor, folder)
    return {
        "kept": tenant.keep_conversations,
        "folders": access_folders(user, tenant),
        "conversations": [to_json(row, user) for row in rows[:MAX_LISTED]],
        "more": len(rows) > MAX_LISTED,
    }


@json_action("GET", "PUT", "PATCH", "DELETE")
def conversation(request: UserRequest, public_id: str) -> dict[str, Any]:
    """One conversation: GET reads, PUT writes, PATCH changes its title, folder or sharing,
    DELETE deletes.
    """
    user = request.user
    if request.method == "GET":
        row = access_conversation(user, public_id)
        return {**to_json(row, user), "document": row.document}
    target: dict[str, Any] = {"actor": user, "public_id": public_id}
    if request.method == "DELETE":
        actions.delete_conversation(**target)
        return {"id": public_id, "deleted": True}
    if request.method == "PUT":
        body = _body(request, "document", "version")
        if not isinstance(body["version"], int):
            raise InvalidRequest("version must be a number.", param="version")
        return to_json(actions.update_conversation(**target, **body), user)
    body, changed = _body(request), None
    if isinstance(title := body.get("title"), str):
        changed = actions.rename_conversation(**target, title=title)
    if isinstance(folder := body.get("folder"), str):
        changed = actions.move_conversation(**target, folder=folder)
    if isinstance(shared := body.get("shared"), bool):
        changed = actions.share_conversation(**target, shared=shared)
    if changed is None:
        raise InvalidRequest("Name a title, a folder, or whether it's shared.", param="title")
    return to_json(changed, user)


@json_action("GET", "POST")
def presets(request: UserRequest) -> dict[str, Any]:
    """The presets of `?tenant=`; POST saves one: {"name", "prompt", "options"}."""
    user = request.user
    tenant = require_tenant(request)
    if request.method == "POST":
        body = _body(request, "name", "prompt", "options")
        for name in ("name", "prompt"):
            if not isinstance(body[name], str):
                raise InvalidRequest(f"{name} must be a string.", param=name)
        row = actions.save_preset(actor=user, tenant=tenant, **body)
        return _preset_json(row, user, access_role(user, tenant))
    rows, role = access_presets(user, tenant), access_role(user, tenant)
    return {"presets": [_preset_json(row, user, role) for row in rows]}


@json_action("GET", "DELETE")
def preset(request: UserRequest, public_id: str) -> dict[str, Any]:
    """One preset: GET reads, DELETE deletes."""
    user = request.user
    if request.method == "GET":
        row = access_preset(user, public_id)
        return _preset_json(row, user, access_role(user, row.tenant))
    actions.delete_preset(actor=user, public_id=public_id)
    return {"id": public_id, "deleted": True}


def _preset_json(row: PlaygroundPreset, user: User, role: Role) -> dict[str, Any]:
    return {
        "id": row.public_id,
        "name": row.name,
        "prompt": row.prompt,
        "options": row.options,
        "by": row.user.get_username() if row.user else "",
        "may_change": actions.may_change_preset(user, role, row),
    }


#: Lifetime in seconds of images of a tenant that doesn't store conversations.
UNKEPT_PICTURE_S = 86_400


@json_action("POST")
def upload_picture(request: UserRequest) -> dict[str, Any]:
    """Store the form's `file` for the messages of a conversation in `?tenant=`."""
    tenant = require_tenant(request)
    caller = write_caller(request, tenant)
    file = request.FILES.get("file")
    if file is None or not file.size:
        raise InvalidRequest("file must be a picture or a PDF with content.", param="file")
    max_bytes = min(settings.QUIRE.max_file_bytes, settings.QUIRE.max_body_bytes)
    if file.size > max_bytes:
        raise PayloadTooLarge(
            f"The file has {file.size} bytes; the limit is {max_bytes}.", param="file"
        )
    is_document = file.content_type == "application/pdf" or (file.name or "").endswith(".pdf")
    row = actions.create_file(
        caller=caller,
        filename=file.name or "",
        purpose="user_data" if is_document else "vision",
        size=file.size,
        chunks=file.chunks(),
        expires_at=None if tenant.keep_conversations else lifetime(UNKEPT_PICTURE_S),
    )
    stored = {"id": row.public_id, "name": row.filename}
    return {**stored, "kind": "document"} if is_document else stored


def to_json(row: SavedConversation, user: User) -> dict[str, Any]:
    """A conversation without its messages."""
    return {
        "id": row.public_id,
        "title": row.title,
        "folder": row.folder,
        "version": row.version,
        "tenant": row.tenant.slug,
        "changed_at": row.changed_at.isoformat(),
        "shared": row.shared_at is not None,
        "own": row.user_id == user.pk,
        "by": row.user.get_username(),
    }


def _body(request: UserRequest, *names: str) -> dict[str, Any]:
    """The named fields of the body, all required; without names the whole body."""
    body = parse_object(request.body)
    for name in names:
        if name not in body:
            raise InvalidRequest(f"{name} is missing.", param=name)
    return {name: body[name] for name in names} if names else body


#: Largest integer that JavaScript represents exactly.
MAX_SAFE_INTEGER = 2**53 - 1
_MAX_INT = 2**31 - 1


@dataclass(frozen=True)
class SamplingField:
    """A sampling parameter in the playground's form.

    Attributes:
        name: as in `SamplingParams`, whose ranges `low` and `high` repeat.
        kind: "number", "integer" or "strings" (one per line).
        low, high: inclusive range, unless `low_open`.
        step: increment of the field's arrow keys.
        rest: position of the slider while the field is empty; None: no slider.
        slide_to: upper end of the slider, if below `high`.
    """

    name: str
    label: str
    help: str
    kind: str = "number"
    low: float | None = None
    high: float | None = None
    low_open: bool = False
    step: float = 0.05
    rest: float | None = None
    slide_to: float | None = None
    max_items: int = MAX_STOP
    chars: int = MAX_STOP_CHARS

    @property
    def slider_low(self) -> float | None:
        """The slider's lower end: `low`, or `step` if the range is open."""
        return self.step if self.low_open else self.low

    @property
    def slider_high(self) -> float | None:
        """The slider's upper end."""
        return self.high if self.slide_to is None else self.slide_to


@dataclass(frozen=True)
class Group:
    """Fields under one heading."""

    title: str
    fields: tuple[SamplingField, ...]


_CHOICE = Group(
    "Sampling",
    (
        SamplingField(
            "temperature",
            "Temperature",
            "0 always takes the likeliest token; higher values vary more.",
            low=0,
            high=100,
            rest=1,
            slide_to=2,
        ),
        SamplingField(
            "top_p",
            "Top p",
            "Only the likeliest tokens that together have this probability.",
            low=0,
            high=1,
            low_open=True,
            step=0.01,
            rest=1,
        ),
        SamplingField(
            "min_p",
            "Min p",
            "Only tokens at least this likely, relative to the likeliest one.",
            low=0,
            high=1,
            step=0.01,
            rest=0,
        ),
        SamplingField(
            "top_k",
            "Top k",
            "Only the k likeliest tokens; -1: all.",
            kind="integer",
            low=-1,
            high=_MAX_INT,
            step=1,
        ),
    ),
)
_LENGTH = Group(
    "Length",
    (
        SamplingField(
            "max_tokens",
            "Max tokens",
            "The longest answer; empty: as long as the context allows.",
            kind="integer",
            low=1,
            high=_MAX_INT,
            step=1,
        ),
        SamplingField(
            "stop", "Stop strings", "One per line; \\n stands for a new line.", kind="strings"
        ),
    ),
)
_REPETITION = Group(
    "Repetition",
    (
        SamplingField(
            "repetition_penalty",
            "Repetition penalty",
            "Above 1: tokens of the prompt and answer become less likely.",
            low=0,
            high=2,
            low_open=True,
            rest=1,
        ),
        SamplingField(
            "presence_penalty",
            "Presence penalty",
            "Above 0: tokens that the answer already has become less likely.",
            low=-2,
            high=2,
            rest=0,
        ),
        SamplingField(
            "frequency_penalty",
            "Frequency penalty",
            "Above 0: the more often a token occurs, the less likely it gets.",
            low=-2,
            high=2,
            rest=0,
        ),
    ),
)
_SEED = Group(
    "Repeatability",
    (
        SamplingField(
            "seed",
            "Seed",
            "The same seed gives the same answer to the same question.",
            kind="integer",
            low=0,
            high=MAX_SAFE_INTEGER,
            step=1,
        ),
    ),
)

GROUPS = (_CHOICE, _LENGTH, _REPETITION, _SEED)


#: Path of the playground's WebSocket, as in `inference.routing`.
SOCKET_PATH = "/ws/playground/"

#: Suggested prompts on an empty page, easy enough for small models.
STARTERS = (
    "What is the capital of Portugal?",
    "What is 17 + 25?",
    "Tell me a short story about a fox.",
)


@page_view
def playground(request: UserRequest) -> HttpResponse:
    """Chat with a model over a WebSocket."""
    context = {"groups": GROUPS, "socket_path": mounted(SOCKET_PATH), "starters": STARTERS}
    return render(request, "console/playground.html", context)
