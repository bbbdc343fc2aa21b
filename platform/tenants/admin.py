"""Django's admin: read-only rows, and actions on them that call `actions`."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, cast

from django.contrib import admin, messages
from django.db import models
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils import timezone

from engine.contract.errors import QuireError
from tenants import actions
from tenants.models import ApiKey, AuditEntry, Membership, Tenant, User


class ReadOnlyModelAdmin(admin.ModelAdmin):
    """Read-only rows, for operators and for staff with the permission to view them."""

    actions: Sequence[str] | None = None
    show_full_result_count = False
    #: URL name of the console page where these rows are changed.
    console_page = ""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class ReadOnlyInline(admin.TabularInline):
    """Rows that belong to the page's object."""

    extra = 0
    can_delete = False

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        return self.fields


class ActionsAdmin(ReadOnlyModelAdmin):
    """Writes through the app's actions: `row_action` in the list, `editable` fields on the page.

    The actions check the user's rights; Django's permissions are needed for viewing alone.
    """

    #: Fields that operators may change on an object's page. Requires `fields` and `save_changes`.
    editable: tuple[str, ...] = ()

    def save_changes(self, actor: User, row: Any, changes: dict[str, Any]) -> None:
        """Call the action that writes the editable fields that have changed."""
        raise NotImplementedError

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return bool(self.editable) and request.user.is_superuser

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        return [name for name in self.fields or () if name not in self.editable]

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Show an action's refusal as a message. Its transaction is rolled back by then."""
        try:
            return super().changeform_view(request, object_id, form_url, extra_context)
        except QuireError as error:
            self.message_user(request, error.message, messages.ERROR)
            return HttpResponseRedirect(request.get_full_path())

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        changes = {name: form.cleaned_data[name] for name in form.changed_data}
        if changes:
            self.save_changes(cast(User, request.user), obj, changes)

    def save_related(self, request: HttpRequest, form: Any, formsets: Any, change: bool) -> None:
        """The action has saved many-to-many fields; inlines are read-only."""
        for formset in formsets:
            self.save_formset(request, form, formset, change=change)  # sets what Django logs


def row_action(description: str, done: str) -> Callable[[Callable[..., object]], Callable]:
    """Turn a method that changes one row, `(self, actor, row)`, into an action of the list.

    `done`: the end of its message, as in "3 keys revoked". A row's refusal is a message too.
    """

    def decorate(act: Callable[..., object]) -> Callable[..., None]:
        @admin.action(description=description, permissions=["view"])
        @wraps(act)
        def run(self: admin.ModelAdmin, request: HttpRequest, rows: QuerySet) -> None:
            count = 0
            for row in rows:
                try:
                    act(self, request.user, row)
                    count += 1
                except QuireError as error:
                    self.message_user(request, error.message, messages.ERROR)
            if count:
                self.message_user(request, f"{count} {done}.", messages.SUCCESS)

        return run

    return decorate


class StateFilter(admin.SimpleListFilter):
    """Active, expired or revoked keys."""

    title = "state"
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(state, state) for state in ("active", "expired", "revoked")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[ApiKey]) -> QuerySet[ApiKey]:
        expired = models.Q(expires_at__lte=timezone.now())
        if self.value() == "revoked":
            return queryset.exclude(revoked_at=None)
        if self.value() == "expired":
            return queryset.filter(expired, revoked_at=None)
        if self.value() == "active":
            return queryset.filter(~expired, revoked_at=None)
        return queryset


@admin.register(ApiKey)
class ApiKeyAdmin(ActionsAdmin):
    console_page = "keys"
    list_display = (
        *("prefix", "name", "tenant", "state"),
        *("created_by", "created_at", "expires_at", "last_used_at"),
    )
    list_filter = (StateFilter, "tenant")
    search_fields = ("public_id", "name", "tenant__slug", "created_by__username")
    list_select_related = ("tenant", "created_by")
    date_hierarchy = "created_at"
    fields = (
        *("prefix", "name", "tenant", "state", "scopes", *actions.KEY_LIMIT_FIELDS),
        *("created_by", "service_account"),
        *("created_at", "expires_at", "revoked_at", "last_used_at"),
    )
    actions = ("revoke",)

    @row_action("Revoke selected keys", done="keys revoked")
    def revoke(self, actor: User, key: ApiKey) -> None:
        actions.revoke_key(actor=actor, key=key)


@admin.register(AuditEntry)
class AuditEntryAdmin(ReadOnlyModelAdmin):
    console_page = "audit"
    list_display = (
        *("at", "actor_label", "actor_kind", "address"),
        *("action", "target_type", "target_label", "tenant"),
    )
    list_filter = ("actor_kind", "tenant")
    search_fields = (
        *("actor_label", "action", "address"),
        *("target_label", "target_id", "tenant__slug"),
    )
    exclude = ("actor", "actor_key")  # their rows may be deleted; the label stays
    list_select_related = ("tenant",)
    date_hierarchy = "at"


@admin.register(Membership)
class MembershipAdmin(ReadOnlyModelAdmin):
    console_page = "members"
    list_display = ("user", "tenant", "role", "created_at")
    list_filter = ("role", "tenant")
    search_fields = ("user__username", "user__email", "tenant__slug")
    list_select_related = ("user", "tenant")


class TenantMembershipInline(ReadOnlyInline):
    model = Membership
    fields = ("user", "role", "created_at")


@admin.register(Tenant)
class TenantAdmin(ActionsAdmin):
    console_page = "tenants"
    list_display = (
        *("slug", "name", "active"),
        *(name for name in actions.LIMITS if name != "keep_usage_days"),
        "created_at",
    )
    list_filter = ("active",)
    search_fields = ("slug", "name")
    editable = ("name", *actions.LIMITS, *actions.OWNER_FIELDS)
    fields = ("slug", *editable, "active", "created_at")
    inlines = (TenantMembershipInline,)
    actions = ("activate", "deactivate", "rotate_cache_salts")

    def save_changes(self, actor: User, row: Tenant, changes: dict[str, Any]) -> None:
        actions.update_tenant(actor=actor, tenant=row, **changes)

    @row_action("Switch selected tenants on", done="tenants switched on")
    def activate(self, actor: User, tenant: Tenant) -> None:
        actions.set_tenant_active(actor=actor, tenant=tenant, active=True)

    @row_action("Switch selected tenants off (their keys are refused)", done="tenants switched off")
    def deactivate(self, actor: User, tenant: Tenant) -> None:
        actions.set_tenant_active(actor=actor, tenant=tenant, active=False)

    @row_action(
        "Give selected tenants a new cache namespace", done="tenants got a new cache namespace"
    )
    def rotate_cache_salts(self, actor: User, tenant: Tenant) -> None:
        actions.rotate_cache_salt(actor=actor, tenant=tenant)


class UserMembershipInline(ReadOnlyInline):
    model = Membership
    fields = ("tenant", "role", "created_at")


@admin.register(User)
class UserAdmin(ActionsAdmin):
    """Users. Operators set here what staff may view in the admin."""

    console_page = "members"
    list_display = (
        *("username", "email", "is_active", "is_staff"),
        *("is_superuser", "last_login", "date_joined"),
    )
    list_filter = ("is_active", "is_staff", "is_superuser", "groups")
    search_fields = ("username", "first_name", "last_name", "email")
    ordering = ("username",)
    editable = filter_horizontal = ("groups", "user_permissions")
    fields = (
        *("username", "email", "first_name", "last_name", "is_active", "is_staff"),
        *("is_superuser", *editable, "last_login", "date_joined"),
    )
    inlines = (UserMembershipInline,)

    def save_changes(self, actor: User, row: User, changes: dict[str, Any]) -> None:
        actions.set_staff_rights(
            actor=actor,
            user=row,
            groups=changes.get("groups", row.groups.all()),
            permissions=changes.get("user_permissions", row.user_permissions.all()),
        )
