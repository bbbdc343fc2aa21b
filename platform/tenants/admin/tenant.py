"""Tenants."""

from typing import Any

from django.contrib import admin
from django.db.models import Count, Q, QuerySet
from django.http import HttpRequest

from tenants import actions
from tenants.admin.base import ActionsAdmin
from tenants.models import Membership, Tenant

FIELDS = ("name", *actions.LIMITS, *actions.OWN)
#: What a list has room for.
LISTED = tuple(name for name in actions.LIMITS if name != "keep_usage_days")


class UserMembershipInline(admin.TabularInline):
    """The tenant's people; changed on the memberships' own page."""

    model = Membership
    extra = 0
    can_delete = False
    fields = readonly_fields = ("user", "role", "created_at")

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(Tenant)
class TenantAdmin(ActionsAdmin):
    """Who is served, with which share and limits."""

    list_display = (
        "slug",
        "name",
        "active",
        *LISTED,
        "members",
        "active_keys",
        "created_at",
    )
    list_filter = ("active",)
    search_fields = ("slug", "name")
    fields = ("slug", *FIELDS, "active", "created_at")
    readonly_fields = ("active", "created_at")
    inlines = (UserMembershipInline,)
    actions = ("activate", "deactivate", "rotate_cache_salts")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Tenant]:
        """With counts."""
        alive = Q(api_keys__revoked_at=None)
        return (
            super()
            .get_queryset(request)
            .annotate(
                member_count=Count("memberships", distinct=True),
                key_count=Count("api_keys", filter=alive, distinct=True),
            )
        )

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        """A slug is in scripts and bookmarks: it stays."""
        return (*self.readonly_fields, "slug") if obj else self.readonly_fields

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Tenants are switched off: the ledger names them."""
        return False

    @admin.display(ordering="member_count")
    def members(self, tenant: Any) -> int:
        """How many people belong to it."""
        return tenant.member_count

    @admin.display(ordering="key_count")
    def active_keys(self, tenant: Any) -> int:
        """Keys that aren't revoked."""
        return tenant.key_count

    def save_model(self, request: HttpRequest, obj: Tenant, form: Any, change: bool) -> None:
        """Through the actions."""
        values = {name: form.cleaned_data[name] for name in FIELDS if name in form.changed_data}
        if change:
            actions.update_tenant(actor=request.user, tenant=obj, **values)
            return
        values.pop("name", None)
        made = actions.create_tenant(actor=request.user, name=obj.name, slug=obj.slug, **values)
        obj.pk = made.pk
        obj.refresh_from_db()

    @admin.action(description="Switch selected tenants on")
    def activate(self, request: HttpRequest, rows: QuerySet[Tenant]) -> None:
        """Let them in."""
        self._switch(request, rows, True)

    @admin.action(description="Switch selected tenants off (their keys are refused)")
    def deactivate(self, request: HttpRequest, rows: QuerySet[Tenant]) -> None:
        """Refuse their keys and members."""
        self._switch(request, rows, False)

    @admin.action(description="Give selected tenants a new cache namespace")
    def rotate_cache_salts(self, request: HttpRequest, rows: QuerySet[Tenant]) -> None:
        """What they cached is never hit again."""
        self.each(
            request,
            rows,
            lambda row: actions.rotate_cache_salt(actor=request.user, tenant=row),
            "tenants got a new cache namespace",
        )

    def _switch(self, request: HttpRequest, rows: QuerySet[Tenant], active: bool) -> None:
        self.each(
            request,
            rows,
            lambda row: actions.set_tenant_active(actor=request.user, tenant=row, active=active),
            f"tenants switched {'on' if active else 'off'}",
        )
