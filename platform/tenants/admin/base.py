"""Admin pages that write through `actions.py`, and pages that don't write at all."""

from collections.abc import Callable
from typing import Any

from django.contrib import admin, messages
from django.db import models
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect

from engine.contract.errors import QuireError


class ActionsAdmin(admin.ModelAdmin):
    """Shows a refusal of an action as a message instead of a server error."""

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """The form; refused changes are rolled back by then."""
        try:
            return super().changeform_view(request, object_id, form_url, extra_context)
        except QuireError as error:
            return self._refused(request, error)

    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """The question whether to delete, and the deed."""
        try:
            return super().delete_view(request, object_id, extra_context)
        except QuireError as error:
            return self._refused(request, error)

    def each(
        self, request: HttpRequest, rows: models.QuerySet, deed: Callable[[Any], object], done: str
    ) -> None:
        """Do something to every selected row, and tell how it went."""
        count = 0
        for row in rows:
            try:
                deed(row)
                count += 1
            except QuireError as error:
                self.message_user(request, error.message, messages.ERROR)
        if count:
            self.message_user(request, f"{count} {done}.", messages.SUCCESS)

    def _refused(self, request: HttpRequest, error: QuireError) -> HttpResponse:
        self.message_user(request, error.message, messages.ERROR)
        return HttpResponseRedirect(request.get_full_path())


class ReadOnlyAdmin(admin.ModelAdmin):
    """For what nobody may change: looking is all."""

    actions = None
    show_full_result_count = False

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False
