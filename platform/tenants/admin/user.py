"""Users."""

from typing import Any

from django.contrib import admin
from django.contrib.auth.admin import UserAdmin as DjangoUserAdmin
from django.http import HttpRequest

from tenants.actors import as_actor
from tenants.audit import record
from tenants.models import Membership, User


class MembershipInline(admin.TabularInline):
    """Where the user belongs; changed on the memberships' own page."""

    model = Membership
    extra = 0
    can_delete = False
    fields = readonly_fields = ("tenant", "role", "created_at")

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(User)
class UserAdmin(DjangoUserAdmin):
    """Django's page for users, with audit rows."""

    list_display = ("username", "email", "is_active", "is_superuser", "last_login", "date_joined")
    inlines = (MembershipInline,)

    def save_model(self, request: HttpRequest, obj: User, form: Any, change: bool) -> None:
        """Save and audit in the transaction that the form's view has opened."""
        super().save_model(request, obj, form, change)
        record(
            actor=as_actor(request.user),
            action="user.update" if change else "user.create",
            target=obj,
            fields=sorted(form.changed_data),
        )

    def delete_model(self, request: HttpRequest, obj: User) -> None:
        """Audit before the row is gone."""
        record(actor=as_actor(request.user), action="user.delete", target=obj)
        super().delete_model(request, obj)

    def delete_queryset(self, request: HttpRequest, queryset: Any) -> None:
        """One by one, each with its audit row."""
        for user in queryset:
            self.delete_model(request, user)
