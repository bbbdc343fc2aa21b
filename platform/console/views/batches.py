"""The pages of batches and files: of one tenant, with live progress, for its people.

They take the way of the API's endpoints: the same actions, the same bounds, the same words.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from asgiref.sync import async_to_sync
from django.conf import settings
from django.contrib.auth.decorators import login_required
from django.http import FileResponse, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.http import urlencode
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe
from pydantic import ValidationError

from common.errors import NotFound, PermissionDenied
from common.one_time import pop_one_time, store_one_time
from common.task_queue import BROKER_ERRORS
from console.views.base import current_tenant, json_view, tenant_context
from engine.contract.errors import InvalidRequest, QuireError
from inference.api.files import MAX_LIFETIME_S
from inference.schemas.base import BatchRequest
from inference.work import send_job
from storage import access, actions
from storage.access import Batch, StoredFile, blob_path
from storage.actions.files import lifetime, needed_by_batches
from storage.models import OPEN
from tenants.access import access_role, first_tenant
from tenants.actors import role_in
from tenants.authentication import Caller, caller_for_user
from tenants.models import Role, Tenant, User

MAX_ROWS = 200
#: Of a batch's faults that the page shows.
MAX_ERRORS = 50
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
WINDOWS = ("24h", "1h", "7d", "14d")
Deed = Callable[[HttpRequest, Tenant, Caller], str]


def read_caller(request: HttpRequest, tenant: Tenant) -> Caller:
    """Whose objects are read: any member's tenant's, and an operator's any. It may ask nothing."""
    user: Any = request.user
    access_role(user, tenant)
    return Caller(
        tenant_id=tenant.pk,
        tenant=tenant.slug,
        key_id=None,
        user_id=user.pk,
        cache_namespace="",
        weight=1.0,
        max_priority=0,
        scopes=frozenset(),
        requests_per_minute=None,
        tokens_per_minute=None,
    )


def may_write(user: User, tenant: Tenant) -> bool:
    """Whether somebody makes files and batches there, with rights of their own: a member."""
    role = role_in(user, tenant)
    return role is not None and role.rank >= Role.MEMBER.rank


def write_caller(request: HttpRequest, tenant: Tenant) -> Caller:
    """Who acts. Raises `PermissionDenied` for viewers and for who belongs to no such tenant."""
    user: Any = request.user
    if not may_write(user, tenant):
        raise PermissionDenied(f"Only members of {tenant.slug} upload files and create batches.")
    return async_to_sync(caller_for_user)(user, tenant.slug)


def page(name: str) -> Callable[..., Callable[..., HttpResponse]]:
    """A view by GET of one tenant's page, from a function that makes its context."""

    def decorate(function: Callable[..., dict[str, Any]]) -> Callable[..., HttpResponse]:
        @require_safe
        @never_cache
        @login_required
        @wraps(function)
        def view(request: HttpRequest, **where: Any) -> HttpResponse:
            try:
                tenant = current_tenant(request)
                if tenant is None and where:
                    raise NotFound("Not found.")
                return show(request, tenant, name, function, **where)
            except QuireError as error:
                return show(request, first_tenant(request.user), name, None, error=error)

        return view

    return decorate


def show(
    request: HttpRequest,
    tenant: Tenant | None,
    name: str,
    function: Callable[..., dict[str, Any]] | None,
    *,
    error: QuireError | None = None,
    **where: Any,
) -> HttpResponse:
    """A page of this tenant, with what was just done or refused."""
    user: Any = request.user
    context: dict[str, Any] = {**tenant_context(user, tenant), "error": error, "told": {}}
    if tenant is not None:
        kept = pop_one_time(request) if request.method == "GET" and error is None else {}
        context["told"] = kept if kept.get("tenant") == tenant.slug else {}
        context["may_write"] = may_write(user, tenant)
        if function is not None:
            context |= function(tenant, read_caller(request, tenant), **where)
    status = error.status if error else 200
    return render(request, f"console/{name}.html", context, status=status)


def batch_list_context(tenant: Tenant, caller: Caller) -> dict[str, Any]:
    """The newest batches, and the files that one can be made of."""
    rows, more = access.page(access.access_batches(caller), limit=MAX_ROWS, after=None)
    files = access.access_files(caller).filter(purpose="batch").order_by("-pk")[:MAX_ROWS]
    return {
        "batches": [figures(row) for row in rows],
        "more": more,
        "files": files,
        "endpoints": ENDPOINTS,
        "windows": WINDOWS,
    }


def batch_context(tenant: Tenant, caller: Caller, public_id: str) -> dict[str, Any]:
    """A batch: how far it is, what went wrong, its files."""
    row = access.access_batch(caller, public_id)
    return {
        "batch": row,
        "figures": figures(row),
        "errors": row.errors[:MAX_ERRORS],
        "moments": [
            (name, getattr(row, column))
            for name, column in (
                ("Made", "created_at"),
                ("Began", "in_progress_at"),
                ("Finalized", "finalizing_at"),
                ("Completed", "completed_at"),
                ("Failed", "failed_at"),
                ("Expired", "expired_at"),
                ("Cancelled", "cancelled_at"),
                ("Window ends", "expires_at"),
            )
            if getattr(row, column)
        ],
    }


def list_files(tenant: Tenant, caller: Caller) -> dict[str, Any]:
    """The newest files, and what they take of the tenant's room."""
    rows, more = access.page(access.access_files(caller), limit=MAX_ROWS, after=None)
    needed = set(needed_by_batches().filter(tenant=tenant).values_list("input_file_id", flat=True))
    return {
        "files": [(row, row.public_id in needed) for row in rows],
        "more": more,
        "used": access.stored_bytes(tenant.pk),
        "room": settings.QUIRE["TENANT_FILE_BYTES"],
        "most": settings.QUIRE["MAX_FILE_BYTES"],
    }


def figures(row: Batch) -> dict[str, Any]:
    """A batch's progress as JSON."""
    done = row.completed + row.failed
    return {
        "id": row.public_id,
        "endpoint": row.endpoint,
        "status": row.status,
        "total": row.total,
        "completed": row.completed,
        "failed": row.failed,
        "percent": round(100 * done / row.total) if row.total else 0,
        "open": row.status in OPEN,
        "errors": len(row.errors),
        "why": str(row.errors[0].get("message", "")) if row.errors else "",
        "created": row.created_at.strftime("%Y-%m-%d %H:%M"),
        "left": _time_left(row),
    }


def _time_left(row: Batch) -> str:
    """About how long it still takes, at the pace that it had; "" where that can't be told."""
    done = row.completed + row.failed
    if row.status != "in_progress" or not done or row.in_progress_at is None:
        return ""
    seconds = (timezone.now() - row.in_progress_at).total_seconds() / done * (row.total - done)
    if seconds < 90:
        return f"about {max(1, round(seconds))} s left"
    minutes = seconds / 60
    return f"about {minutes:.0f} min left" if minutes < 90 else f"about {minutes / 60:.1f} h left"


batches = page("batches")(batch_list_context)
batch = page("batch")(batch_context)
files = page("files")(list_files)


@json_view
def progress(request: HttpRequest) -> dict[str, Any]:
    """How far a tenant's newest batches are, or the one of `?batch=`."""
    tenant = current_tenant(request)
    if tenant is None:
        return {"batches": []}
    caller = read_caller(request, tenant)
    if wanted := request.GET.get("batch", ""):
        return {"batches": [figures(access.access_batch(caller, wanted))]}
    rows, _ = access.page(access.access_batches(caller), limit=MAX_ROWS, after=None)
    return {"batches": [figures(row) for row in rows]}


def deed(
    name: str, function_of_page: Callable[..., dict[str, Any]]
) -> Callable[[Callable[..., str]], Callable[..., HttpResponse]]:
    """A view by POST that does something, then shows the page `name`, which says so."""

    def decorate(function: Callable[..., str]) -> Callable[..., HttpResponse]:
        @require_POST
        @never_cache
        @login_required
        @wraps(function)
        def view(request: HttpRequest, **where: Any) -> HttpResponse:
            tenant: Tenant | None = None
            try:
                tenant = current_tenant(request)
                if tenant is None:
                    raise NotFound("You belong to no tenant.")
                text = function(request, tenant, write_caller(request, tenant), **where)
            except QuireError as error:
                shown = function_of_page if tenant is not None else None
                tenant = tenant or first_tenant(request.user)
                return show(request, tenant, name, shown, error=error)
            store_one_time(request, tenant=tenant.slug, text=text)
            return redirect(f"{reverse(name)}?{urlencode({'tenant': tenant.slug})}")

        return view

    return decorate


@deed("batches", batch_list_context)
def add_batch(request: HttpRequest, tenant: Tenant, caller: Caller) -> str:
    """A batch of a file's requests."""
    form = request.POST
    try:
        wanted = BatchRequest(
            input_file_id=form.get("file", ""),
            endpoint=form.get("endpoint", ""),  # type: ignore[arg-type] - it's what is checked
            completion_window=form.get("window", ""),
        )
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        told = {"input_file_id": "Choose a file.", "endpoint": "Choose an endpoint."}
        raise InvalidRequest(told.get(field, first["msg"]), param=field) from error
    made = actions.create_batch(
        caller=caller,
        input_file_id=wanted.input_file_id,
        endpoint=wanted.endpoint,
        completion_window=wanted.completion_window,
        window_s=wanted.window_s,
        metadata={},
    )
    _enqueue(made.public_id)
    return f"{made.public_id} waits for a worker."


@deed("batches", batch_list_context)
def cancel(request: HttpRequest, tenant: Tenant, caller: Caller, public_id: str) -> str:
    """The end of a batch; what is done is in its files."""
    row = actions.cancel_batch(caller=caller, public_id=public_id)
    _enqueue(row.public_id)
    return f"{row.public_id} is being cancelled. Answers so far are in its files."


@deed("files", list_files)
def upload(request: HttpRequest, tenant: Tenant, caller: Caller) -> str:
    """Keep a file of requests."""
    sent = request.FILES.getlist("file")
    if len(sent) != 1:
        raise InvalidRequest("Choose one file.", param="file")
    (file,) = sent
    size, most = file.size or 0, settings.QUIRE["MAX_FILE_BYTES"]
    if not size:
        raise InvalidRequest("The file is empty.", param="file")
    if size > most:
        raise InvalidRequest(f"The file has {size} bytes; the limit is {most}.", param="file")
    days = request.POST.get("days", "").strip()
    if days and not (days.isascii() and days.isdigit() and 1 <= int(days[:4]) <= 30):
        raise InvalidRequest("Days must be a whole number from 1 to 30.", param="days")
    seconds = min(int(days) * 86_400, MAX_LIFETIME_S) if days else None
    made = actions.create_file(
        caller=caller,
        filename=file.name or "",
        purpose="batch",
        size=size,
        chunks=file.chunks(),
        expires_at=lifetime(seconds),
    )
    return f"{made.filename} is uploaded as {made.public_id}."


@deed("files", list_files)
def delete(request: HttpRequest, tenant: Tenant, caller: Caller, public_id: str) -> str:
    """Forget a file and its bytes."""
    name = access.access_file(caller, public_id).filename
    actions.delete_file(caller=caller, public_id=public_id)
    return f"{name} is deleted."


@require_safe
@never_cache
@login_required
def download(request: HttpRequest, public_id: str) -> HttpResponseBase:
    """A file, always as a download: nothing in it can run in a browser."""
    try:
        tenant = current_tenant(request)
        if tenant is None:
            raise NotFound("File not found.")
        row: StoredFile = access.access_file(read_caller(request, tenant), public_id)
        path = blob_path(row.tenant_id, row.public_id)
        try:
            content = path.open("rb")
        except FileNotFoundError:
            raise NotFound("The content of the file no longer exists.") from None
    except QuireError as error:
        return show(request, first_tenant(request.user), "files", None, error=error)
    response = FileResponse(
        content,
        as_attachment=True,
        filename=row.filename,
        content_type="application/octet-stream",
    )
    response["X-Content-Type-Options"] = "nosniff"
    return response


def _enqueue(public_id: str) -> None:
    """Without Redis they find it by themselves, later."""
    try:
        send_job("batch", public_id)
    except BROKER_ERRORS:
        return
