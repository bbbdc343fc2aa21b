"""The playground's kept conversations, as JSON for its page. Whoever logged in sees their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from console.tenancy import named_tenant
from engine.contract.errors import InvalidRequest, QuireError
from inference.errors import error_response
from inference.settings import gateway_settings
from inference.web.json_body import parse_object
from storage import actions
from storage.access_conversations import MAX_LISTED, access_conversation, access_conversations
from storage.models import SavedConversation
from tenants.authentication import AuthenticationFailed
from tenants.errors import NotFound

Answer = Callable[..., dict[str, Any]]
View = Callable[..., HttpResponse]


def json_deed(*methods: str) -> Callable[[Answer], View]:
    """A view of a function that answers with JSON. Django's CSRF check guards what it changes."""

    def decorate(function: Answer) -> View:
        @require_http_methods(methods)
        @never_cache
        @wraps(function)
        def view(request: HttpRequest, **where: Any) -> HttpResponse:
            try:
                if not request.user.is_authenticated:
                    raise AuthenticationFailed("Log in first.", code="not_logged_in")
                return JsonResponse(function(request, **where))
            except QuireError as error:
                return error_response(error)

        return view

    return decorate


@json_deed("GET", "POST")
def conversations(request: HttpRequest) -> dict[str, Any]:
    """Those of the user in `?tenant=`, found by `?q=`, a page from `?before=`; POST: a new one."""
    user: Any = request.user
    tenant = named_tenant(request)
    if tenant is None:
        raise NotFound("You belong to no tenant.")
    if request.method == "POST":
        made = actions.create_conversation(
            actor=user, tenant=tenant, document=_body(request, "document")["document"]
        )
        return shown(made, user)
    search, before = (request.GET.get(name, "") for name in ("q", "before"))
    found = access_conversations(user, tenant, search, before)
    return {
        "kept": tenant.keep_conversations,
        "conversations": [shown(row, user) for row in found[:MAX_LISTED]],
        "more": len(found) > MAX_LISTED,
    }


@json_deed("GET", "PUT", "PATCH", "DELETE")
def conversation(request: HttpRequest, public_id: str) -> dict[str, Any]:
    """One: read, written (PUT), renamed or shared (PATCH), deleted."""
    user: Any = request.user
    if request.method == "GET":
        row = access_conversation(user, public_id)
        return {**shown(row, user), "document": row.document}
    of = {"actor": user, "public_id": public_id}
    if request.method == "DELETE":
        actions.delete_conversation(**of)
        return {"id": public_id, "deleted": True}
    if request.method == "PUT":
        body = _body(request, "document", "version")
        if not isinstance(body["version"], int):
            raise InvalidRequest("version must be a number.", param="version")
        return shown(actions.update_conversation(**of, **body), user)
    body = _body(request)
    row = None
    if isinstance(title := body.get("title"), str):
        row = actions.rename_conversation(**of, title=title)
    if isinstance(shared := body.get("shared"), bool):
        row = actions.share_conversation(**of, shared=shared)
    if row is None:
        raise InvalidRequest("Name a title, or whether it's shared.", param="title")
    return shown(row, user)


def shown(row: SavedConversation, user: Any) -> dict[str, Any]:
    """What a list tells of it."""
    return {
        "id": row.public_id,
        "title": row.title,
        "version": row.version,
        "tenant": row.tenant.slug,
        "changed_at": row.changed_at.isoformat(),
        "shared": row.shared_at is not None,
        "own": row.user_id == user.pk,
        "by": row.user.get_username(),
    }


def _body(request: HttpRequest, *names: str) -> dict[str, Any]:
    """The fields of these names, which must be there; all of them for none."""
    body = parse_object(request.body, gateway_settings().max_json_depth)
    for name in names:
        if name not in body:
            raise InvalidRequest(f"{name} is missing.", param=name)
    return {name: body[name] for name in names} if names else body
