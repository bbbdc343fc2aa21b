"""Readers' feedback on answers: stored with the request, exported as a data set."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from django.db import transaction
from django.db.models import QuerySet

from engine.contract.errors import InvalidRequest
from metering.models import RequestContent, RequestEntry, RequestFeedback
from tenants.access import access_role
from tenants.actors import require_role
from tenants.models import Role, Tenant, User

MAX_COMMENT_CHARS = 2000
#: Number of rows read at once for the data set.
BATCH = 500


@transaction.atomic
def set_feedback(
    *, actor: User, entry: RequestEntry, is_good: bool | None, comment: str = ""
) -> RequestFeedback | None:
    """Set the actor's feedback on a request of their tenant; None removes it.

    Raises: `NotFound`; `InvalidRequest` (`comment`).
    """
    if len(comment) > MAX_COMMENT_CHARS:
        raise InvalidRequest(
            f"comment must have at most {MAX_COMMENT_CHARS} characters.", param="comment"
        )
    if "\0" in comment:
        raise InvalidRequest("comment must not contain NUL characters.", param="comment")
    access_role(actor, entry.tenant)
    key: dict[str, Any] = {"tenant": entry.tenant, "request_id": entry.request_id, "user": actor}
    if is_good is None:
        RequestFeedback.objects.filter(**key).delete()
        return None
    row, _ = RequestFeedback.objects.update_or_create(
        **key, defaults={"is_good": is_good, "comment": comment}
    )
    return row


def feedback_of(user: User, entry: RequestEntry) -> QuerySet[RequestFeedback]:
    """Feedback on a request that the user may see."""
    access_role(user, entry.tenant)
    rows = RequestFeedback.objects.filter(tenant=entry.tenant, request_id=entry.request_id)
    return rows.select_related("user")


def feedback_lines(user: User, tenant: Tenant) -> Iterator[str]:
    """The tenant's feedback as JSON lines, with prompt and answer where they are stored.

    Raises: `PermissionDenied` for members below admin.
    """
    require_role(user, tenant, Role.ADMIN)
    rows = RequestFeedback.objects.filter(tenant=tenant).select_related("user").order_by("pk")
    return _lines(rows, tenant)


def _lines(rows: QuerySet[RequestFeedback], tenant: Tenant) -> Iterator[str]:
    last = 0
    while batch := list(rows.filter(pk__gt=last)[:BATCH]):
        last = batch[-1].pk
        ids = [row.request_id for row in batch]
        entries = {
            entry.request_id: entry
            for entry in RequestEntry.objects.filter(tenant=tenant, request_id__in=ids)
        }
        contents = {
            content.request_id: content
            for content in RequestContent.objects.filter(tenant=tenant, request_id__in=ids)
        }
        for row in batch:
            entry, content = entries.get(row.request_id), contents.get(row.request_id)
            line = {
                "request_id": row.request_id,
                "model": entry.model if entry else None,
                "adapter": entry.adapter if entry else None,
                "user": row.user.username,
                "good": row.is_good,
                "comment": row.comment,
                "at": row.changed_at.isoformat(),
                "prompt": content.prompt if content else None,
                "answer": content.answer if content else None,
            }
            yield json.dumps(line, ensure_ascii=False) + "\n"
