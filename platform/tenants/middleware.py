"""Notes where a request comes from, for the audit log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest
from django.utils.decorators import sync_and_async_middleware

from tenants.audit import acting_from


@sync_and_async_middleware
def note_address(get_response: Callable[[HttpRequest], Any]) -> Callable[..., Any]:
    """Middleware: the address of the request being served, for `tenants.audit.record`."""

    async def in_loop(request: HttpRequest) -> Any:
        token = acting_from.set(request.META.get("REMOTE_ADDR") or "")
        try:
            return await get_response(request)
        finally:
            acting_from.reset(token)

    def in_thread(request: HttpRequest) -> Any:
        token = acting_from.set(request.META.get("REMOTE_ADDR") or "")
        try:
            return get_response(request)
        finally:
            acting_from.reset(token)

    return in_loop if iscoroutinefunction(get_response) else in_thread
