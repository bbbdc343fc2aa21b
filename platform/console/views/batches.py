"""The pages of a tenant's batches and files.

They use the same actions and limits as the API's endpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

from asgiref.sync import async_to_sync
from django.conf import settings
from django.http import FileResponse, HttpResponse, HttpResponseRedirect
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.utils import timezone
from django.utils.http import content_disposition_header
from pydantic import ValidationError

from common.errors import NotFound, PermissionDenied
from common.one_time import pop_one_time
from common.task_queue import BROKER_ERRORS
from console.views.base import current_tenant, json_view, page_view, post_action, tenant_context
from engine.contract.errors import InvalidRequest, QuireError
from inference.api.files import MAX_LIFETIME_S
from inference.schemas.base import BatchRequest
from inference.work import send_job
from storage import access, actions
from storage.access import Batch, StoredFile, blob_url, open_blob
from storage.actions.files import lifetime, needed_by_batches
from storage.models import OPEN
from tenants.access import access_role, first_tenant
from tenants.actors import role_in
from tenants.authentication import Caller, caller_for_user
from tenants.models import Role, Tenant, User
from tenants.sessions import UserRequest

MAX_ROWS = 200
#: Maximum number of a batch's errors on the page.
MAX_ERRORS = 50
ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
)
WINDOWS = ("24h", "1h", "7d", "14d")


def read_caller(request: UserRequest, tenant: Tenant) -> Caller:
    """Return a caller for reads, without scopes: for the tenant's members and operators."""
    user = request.user
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
    """Return whether the user's role in the tenant is member or higher."""
    role = role_in(user, tenant)
    return role is not None and role.rank >= Role.MEMBER.rank


def write_caller(request: UserRequest, tenant: Tenant) -> Caller:
    """Return a caller for writes. Raises `PermissionDenied` for roles below member."""
    user = request.user
    if not may_write(user, tenant):
        raise PermissionDenied(f"Only members of {tenant.slug} upload files and create batches.")
    return async_to_sync(caller_for_user)(user, tenant.slug)


def page(name: str) -> Callable[..., Callable[..., HttpResponseBase]]:
    """Turn a function that returns a template context into the view of a tenant's page."""

    def decorate(function: Callable[..., dict[str, Any]]) -> Callable[..., HttpResponseBase]:
        @page_view
        @wraps(function)
        def view(request: UserRequest, **kwargs: Any) -> HttpResponse:
            try:
                tenant = current_tenant(request)
                if tenant is None and kwargs:
                    raise NotFound("Not found.")
                return show(request, tenant, name, function, **kwargs)
            except QuireError as error:
                return show(request, first_tenant(request.user), name, None, error=error)

        return view

    return decorate


def show(
    request: UserRequest,
    tenant: Tenant | None,
    name: str,
    function: Callable[..., dict[str, Any]] | None,
    *,
    error: QuireError | None = None,
    **kwargs: Any,
) -> HttpResponse:
    """Render a tenant's page with the last outcome or error."""
    user = request.user
    context: dict[str, Any] = {**tenant_context(user, tenant), "error": error, "outcome": {}}
    if tenant is not None:
        outcome = pop_one_time(request) if request.method == "GET" and error is None else {}
        context["outcome"] = outcome if outcome.get("tenant") == tenant.slug else {}
        context["may_write"] = may_write(user, tenant)
        if function is not None:
            context |= function(tenant, read_caller(request, tenant), **kwargs)
    status = error.status if error else 200
    return render(request, f"console/{name}.html", context, status=status)


def batch_list_context(tenant: Tenant, caller: Caller) -> dict[str, Any]:
    """Template context: the newest batches, and the files available for a new one."""
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
    """Template context of a batch: progress, errors and times."""
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
    """Template context: the newest files and the tenant's storage usage."""
    rows, more = access.page(access.access_files(caller), limit=MAX_ROWS, after=None)
    needed = set(needed_by_batches().filter(tenant=tenant).values_list("input_file_id", flat=True))
    return {
        "files": [(row, row.public_id in needed) for row in rows],
        "more": more,
        "used": access.stored_bytes(tenant.pk),
        "room": settings.QUIRE.tenant_quotas.file_bytes,
        "most": settings.QUIRE.max_file_bytes,
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
        "created": row.created_at,
        "left": _remaining_time(row),
    }


def _remaining_time(row: Batch) -> str:
    """Estimated remaining time at the current rate; "" if unknown."""
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
def progress(request: UserRequest) -> dict[str, Any]:
    """Progress of the batch `?batch=`, or of the tenant's newest batches."""
    tenant = current_tenant(request)
    if tenant is None:
        return {"batches": []}
    caller = read_caller(request, tenant)
    if public_id := request.GET.get("batch", ""):
        return {"batches": [figures(access.access_batch(caller, public_id))]}
    rows, _ = access.page(access.access_batches(caller), limit=MAX_ROWS, after=None)
    return {"batches": [figures(row) for row in rows]}


def _page_with_error(name: str, page_context: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
    """Return how `post_action` shows page `name` with an error."""

    def render_error(
        request: UserRequest, tenant: Tenant | None, *, error: QuireError
    ) -> HttpResponse:
        context = page_context if tenant is not None else None
        return show(request, tenant or first_tenant(request.user), name, context, error=error)

    return render_error


batches_action = post_action("batches", _page_with_error("batches", batch_list_context))
files_action = post_action("files", _page_with_error("files", list_files))


@batches_action
def add_batch(request: UserRequest, tenant: Tenant) -> dict[str, Any]:
    """Create a batch from a file of requests."""
    caller = write_caller(request, tenant)
    form = request.POST
    try:
        body = BatchRequest(
            input_file_id=form.get("file", ""),
            endpoint=cast(Any, form.get("endpoint", "")),  # validated by pydantic
            completion_window=form.get("window", ""),
        )
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        messages = {"input_file_id": "Choose a file.", "endpoint": "Choose an endpoint."}
        raise InvalidRequest(messages.get(field, first["msg"]), param=field) from error
    batch = actions.create_batch(
        caller=caller,
        input_file_id=body.input_file_id,
        endpoint=body.endpoint,
        completion_window=body.completion_window,
        window_s=body.window_s,
        metadata={},
    )
    _enqueue(batch.public_id)
    return {"text": f"{batch.public_id} waits for a worker."}


@batches_action
def cancel(request: UserRequest, tenant: Tenant, public_id: str) -> dict[str, Any]:
    """Cancel a batch; results so far stay in its files."""
    caller = write_caller(request, tenant)
    row = actions.cancel_batch(caller=caller, public_id=public_id)
    _enqueue(row.public_id)
    return {"text": f"{row.public_id} is being cancelled. Answers so far are in its files."}


@files_action
def upload(request: UserRequest, tenant: Tenant) -> dict[str, Any]:
    caller = write_caller(request, tenant)
    files = request.FILES.getlist("file")
    if len(files) != 1:
        raise InvalidRequest("Choose one file.", param="file")
    (file,) = files
    size, max_bytes = file.size or 0, settings.QUIRE.max_file_bytes
    if not size:
        raise InvalidRequest("The file is empty.", param="file")
    if size > max_bytes:
        raise InvalidRequest(f"The file has {size} bytes; the limit is {max_bytes}.", param="file")
    days = request.POST.get("days", "").strip()
    if days and not (days.isascii() and days.isdigit() and 1 <= int(days[:4]) <= 30):
        raise InvalidRequest("Days must be a whole number from 1 to 30.", param="days")
    seconds = min(int(days) * 86_400, MAX_LIFETIME_S) if days else None
    stored = actions.create_file(
        caller=caller,
        filename=file.name or "",
        purpose="batch",
        size=size,
        chunks=file.chunks(),
        expires_at=lifetime(seconds),
    )
    return {"text": f"{stored.filename} is uploaded as {stored.public_id}."}


@files_action
def delete(request: UserRequest, tenant: Tenant, public_id: str) -> dict[str, Any]:
    """Delete a file and its content."""
    caller = write_caller(request, tenant)
    name = access.access_file(caller, public_id).filename
    actions.delete_file(caller=caller, public_id=public_id)
    return {"text": f"{name} is deleted."}


@page_view
def download(request: UserRequest, public_id: str) -> HttpResponseBase:
    """Download a file as an attachment, so that nothing in it runs in a browser."""
    try:
        tenant = current_tenant(request)
        if tenant is None:
            raise NotFound("File not found.")
        row: StoredFile = access.access_file(read_caller(request, tenant), public_id)
        if not may_write(request.user, tenant):
            # As in the API, where a viewer's key has no scope for files: they contain prompts.
            raise PermissionDenied(f"Only members of {tenant.slug} read files.")
        disposition = content_disposition_header(True, row.filename) or "attachment"
        if url := blob_url(row.tenant_id, row.public_id, disposition):
            return HttpResponseRedirect(url)
        try:
            content = open_blob(row.tenant_id, row.public_id)
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
    """Start a worker on the batch; without Redis, workers find it later by polling the database."""
    try:
        send_job("batch", public_id)
    except BROKER_ERRORS:
        return
