"""Who belongs where."""

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from tenants import actions
from tenants.admin.base import ActionsAdmin
from tenants.models import Membership


@admin.register(Membership)
class MembershipAdmin(ActionsAdmin):
    """Who belongs where, and as what."""

    list_display = ("user", "tenant", "role", "created_at")
    list_filter = ("role", "tenant")
    search_fields = ("user__username", "user__email", "tenant__slug")
    autocomplete_fields = ("tenant", "user")
    list_select_related = ("user", "tenant")

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        """Only the role changes."""
        return ("tenant", "user") if obj else ()

    def save_model(self, request: HttpRequest, obj: Membership, form: Any, change: bool) -> None:
        """Through the actions."""
        if change:
            actions.change_role(actor=request.user, membership=obj, role=obj.role)
            return
        made = actions.add_member(
            actor=request.user, tenant=obj.tenant, user=obj.user, role=obj.role
        )
        obj.pk = made.pk

    def delete_model(self, request: HttpRequest, obj: Membership) -> None:
        """Through the actions: keys that they made are revoked."""
        actions.remove_member(actor=request.user, membership=obj)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Membership]) -> None:
        """One by one."""
        self.each(request, queryset, lambda row: self.delete_model(request, row), "members removed")
