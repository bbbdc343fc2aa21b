"""Feedback on answers: set by the playground, exported as JSON lines."""

from __future__ import annotations

from typing import Any

from django.http.response import HttpResponseBase

from common.files import download
from console.views.base import page_view, require_tenant
from console.views.playground import json_action
from engine.contract.errors import InvalidRequest, QuireError
from inference.errors import error_response
from inference.web.json_body import parse_object
from metering.feedback import feedback_lines, set_feedback
from metering.request_log import access_request_entry
from tenants.sessions import UserRequest


@json_action("POST")
def feedback(request: UserRequest, name: str) -> dict[str, Any]:
    """Set the user's feedback on a request: {"good": true, false or null, "comment"}."""
    entry = access_request_entry(request.user, name)
    body = parse_object(request.body)
    if unknown := body.keys() - {"good", "comment"}:
        raise InvalidRequest(f"{min(unknown)} is not a field.", param=min(unknown))
    good, comment = body.get("good"), body.get("comment", "")
    if good is not None and not isinstance(good, bool):
        raise InvalidRequest("good must be true, false or null.", param="good")
    if not isinstance(comment, str):
        raise InvalidRequest("comment must be a string.", param="comment")
    row = set_feedback(actor=request.user, entry=entry, is_good=good, comment=comment)
    return {"good": row.is_good if row else None, "comment": row.comment if row else ""}


@page_view
def export(request: UserRequest) -> HttpResponseBase:
    """The current tenant's feedback as JSON lines."""
    try:
        tenant = require_tenant(request)
        lines = feedback_lines(request.user, tenant)
    except QuireError as error:
        return error_response(error)
    return download(request, lines, f"feedback-{tenant}.jsonl", "application/jsonl")
