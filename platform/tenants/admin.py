"""API keys: made here, shown once, revoked."""

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.auth.admin import UserAdmin as DjangoUserAdmin
from django.contrib.auth.forms import AdminPasswordChangeForm
from django.db import models
from django.db.models import Count, Q, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils import timezone
from django.views.decorators.cache import never_cache

from common.one_time import pop_one_time, store_one_time
from engine.contract.errors import QuireError
from tenants import actions
from tenants import api_keys as scopes
from tenants.actions.users import PROFILE, ROLE_FIELDS
from tenants.actors import to_actor
from tenants.models import ApiKey, AuditEntry, Membership, Tenant, User

# -- Admin pages that write through `actions.py`, and pages that don't write at all.


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


class ReadOnlyModelAdmin(admin.ModelAdmin):
    """For what nobody may change: looking is all."""

    actions = None
    show_full_result_count = False

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


FIELDS = ("tenant", "name", "scopes", "expires_at", *actions.KEY_LIMIT_FIELDS)


class NewKeyForm(forms.ModelForm):
    """What a new key is for and what it may."""

    scopes = forms.MultipleChoiceField(
        choices=[(scope, scope) for scope in sorted(scopes.ALL)],
        initial=sorted(scopes.DEFAULT),
        widget=forms.CheckboxSelectMultiple,
    )

    class Meta:
        model = ApiKey
        fields = FIELDS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "expires_at" in self.fields:  # one label stands before two inputs
            for part, word in zip(self.fields["expires_at"].widget.widgets, ("date", "time")):
                part.attrs["aria-label"] = f"Expires at: {word} (UTC)"


class StateFilter(admin.SimpleListFilter):
    """Active, expired, revoked."""

    title = "state"
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """The choices."""
        return [(state, state) for state in ("active", "expired", "revoked")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[ApiKey]) -> QuerySet[ApiKey]:
        """The keys in the chosen state."""
        expired = {"expires_at__lte": timezone.now()}
        if self.value() == "revoked":
            return queryset.exclude(revoked_at=None)
        if self.value() == "expired":
            return queryset.filter(revoked_at=None, **expired)
        if self.value() == "active":
            return queryset.filter(revoked_at=None).exclude(**expired)
        return queryset


@admin.register(ApiKey)
class ApiKeyAdmin(ActionsAdmin):
    """Keys by their prefix. A key's secret is on the page that made it, and nowhere else."""

    form = NewKeyForm
    list_display = ("prefix", "name", "tenant", "status", "created_by", "created_at", "expires_at")
    list_display += ("last_used_at",)
    list_filter = (StateFilter, "tenant")
    search_fields = ("public_id", "name", "tenant__slug", "created_by__username")
    list_select_related = ("tenant", "created_by")
    autocomplete_fields = ("tenant",)
    date_hierarchy = "created_at"
    actions = ("revoke",)

    def get_fields(self, request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        """The form for a new key; everything that may be shown of an old one."""
        if obj is None:
            return FIELDS
        shown = ("prefix", "status", "created_by", "created_at", "revoked_at", "last_used_at")
        return (*FIELDS, *shown)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """A key is made and revoked, never changed; the list needs the right for its actions."""
        return obj is None and super().has_change_permission(request)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Revoked, not deleted: the ledger and the audit log name it."""
        return False

    @admin.display(description="state")
    def status(self, key: ApiKey) -> str:
        """Active, expired or revoked."""
        return key.state()

    def save_model(self, request: HttpRequest, obj: ApiKey, form: Any, change: bool) -> None:
        """Make the key; its secret stays with this request."""
        values = form.cleaned_data
        made = actions.create_key(
            actor=request.user, **{name: values[name] for name in FIELDS if name in values}
        )
        obj.pk, obj.public_id = made.key.pk, made.key.public_id
        request.new_key = made  # type: ignore[attr-defined]

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """One way to save: the secret must be seen before anything else is done."""
        only = {"show_save_and_add_another": False, "show_save_and_continue": False}
        return super().render_change_form(request, context | only, *args, **kwargs)

    def response_add(
        self, request: HttpRequest, obj: ApiKey, post_url_continue: str | None = None
    ) -> HttpResponse:
        """On to the page with the secret: reloading that makes no second key."""
        made = request.new_key  # type: ignore[attr-defined]
        store_one_time(request, key=made.key.pk, secret=made.secret)
        return HttpResponseRedirect(reverse("admin:tenants_apikey_created"))

    def get_urls(self) -> list[Any]:
        """The page of a new key besides."""
        view = self.admin_site.admin_view(never_cache(self.created))
        return [path("created/", view, name="tenants_apikey_created"), *super().get_urls()]

    def created(self, request: HttpRequest) -> HttpResponse:
        """A new key with its secret, once; then the list."""
        kept = pop_one_time(request)
        key = ApiKey.objects.filter(pk=kept.get("key"), created_by=request.user.pk).first()
        if key is None:
            return HttpResponseRedirect(reverse("admin:tenants_apikey_changelist"))
        context = {
            **self.admin_site.each_context(request),
            "title": "Your new API key",
            "opts": self.opts,
            "key": key,
            "secret": kept["secret"],
        }
        return TemplateResponse(request, "admin/tenants/apikey/created.html", context)

    @admin.action(description="Revoke selected keys", permissions=["change"])
    def revoke(self, request: HttpRequest, rows: QuerySet[ApiKey]) -> None:
        """Refuse them from now on."""
        self.each(
            request,
            rows,
            lambda row: actions.revoke_key(actor=request.user, key=row),
            "keys revoked",
        )


# -- The audit log.


@admin.register(AuditEntry)
class AuditEntryAdmin(ReadOnlyModelAdmin):
    """Who did what to what, when."""

    list_display = ("at", "actor_label", "actor_kind", "address", "action", "target_type")
    list_display += ("target_label", "tenant")
    list_filter = ("action", "actor_kind", "target_type", "tenant")
    search_fields = ("actor_label", "action", "address", "target_label", "target_id")
    search_fields += ("tenant__slug",)
    exclude = ("actor", "actor_key")  # their rows may be gone; the label stays
    list_select_related = ("tenant",)
    date_hierarchy = "at"


# -- Who belongs where.


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


# -- Tenants.


TENANT_FIELDS = ("name", *actions.LIMITS, *actions.OWNER_FIELDS)
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
    fields = ("slug", *TENANT_FIELDS, "active", "created_at")
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
        values = {
            name: form.cleaned_data[name] for name in TENANT_FIELDS if name in form.changed_data
        }
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


# -- Users.


RIGHTS = ("groups", "user_permissions")


class TenantMembershipInline(admin.TabularInline):
    """Where the user belongs; changed on the memberships' own page."""

    model = Membership
    extra = 0
    can_delete = False
    fields = readonly_fields = ("tenant", "role", "created_at")

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class PasswordForm(AdminPasswordChangeForm):
    """Django's form, whose deed goes through the actions."""

    def __init__(self, *args: Any, actor: User, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.actor = actor

    def save(self, commit: bool = True) -> User:
        """Set the password, or take it away."""
        usable = self.cleaned_data.get("set_usable_password", True)
        password = self.cleaned_data["password1"] if usable else None
        self.user = actions.set_password(actor=self.actor, user=self.user, password=password)
        return self.user


@admin.register(User)
class UserAdmin(ActionsAdmin, DjangoUserAdmin):
    """Django's page for users, on our actions."""

    list_display = ("username", "email", "is_active", "is_superuser", "last_login", "date_joined")
    inlines = (TenantMembershipInline,)
    readonly_fields = ("last_login", "date_joined")

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        """What makes somebody staff or an operator is shown to all and changed by operators."""
        if to_actor(request.user).is_operator:
            return self.readonly_fields
        return (*self.readonly_fields, *ROLE_FIELDS, *RIGHTS)

    def has_change_permission(self, request: HttpRequest, obj: User | None = None) -> bool:
        """Staff change ordinary people and themselves."""
        allowed = super().has_change_permission(request, obj)
        return allowed and self._may_touch(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: User | None = None) -> bool:
        """Staff delete ordinary people."""
        allowed = super().has_delete_permission(request, obj)
        return allowed and self._may_touch(request, obj)

    def user_change_password(
        self, request: HttpRequest, id: str, form_url: str = ""
    ) -> HttpResponse:
        """Django's page with a form that knows who asks."""
        page = copy(self)
        page.change_password_form = partial(PasswordForm, actor=request.user)  # type: ignore[assignment]
        return super(UserAdmin, page).user_change_password(request, id, form_url)

    def save_model(self, request: HttpRequest, obj: User, form: Any, change: bool) -> None:
        """Through the actions; the row shows what came of it."""
        values = form.cleaned_data
        if change:
            given = {
                name: values[name] for name in (*PROFILE, *ROLE_FIELDS) if name in form.changed_data
            }
            saved = actions.update_user(actor=request.user, user=obj, **given)
        else:
            usable = values.get("set_usable_password", True)
            saved = actions.create_user(
                actor=request.user,
                username=values["username"],
                password=values["password1"] if usable else None,
            )
        obj.pk = saved.pk
        obj.refresh_from_db()
        obj._state.adding = False

    def save_related(self, request: HttpRequest, form: Any, formsets: Any, change: bool) -> None:
        """Staff rights, where the form has them; memberships aren't changed here."""
        if change and set(RIGHTS).intersection(form.changed_data):
            values = form.cleaned_data
            actions.set_staff_rights(
                actor=request.user,
                user=form.instance,
                groups=values["groups"],
                permissions=values["user_permissions"],
            )
        for formset in formsets:  # read-only: Django's log asks what they changed
            self.save_formset(request, form, formset, change=change)

    def delete_model(self, request: HttpRequest, obj: User) -> None:
        """Through the actions: sessions and keys end, the last owner stays."""
        actions.delete_user(actor=request.user, user=obj)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[User]) -> None:
        """One by one, each with its audit row; what is refused is told."""
        self.each(request, queryset, lambda row: self.delete_model(request, row), "users deleted")

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> tuple[Any, Any, Any, Any]:
        """What goes with a user goes through the actions: no right of its own is needed."""
        to_delete, counts, _, _ = super().get_deleted_objects(objs, request)
        return to_delete, counts, set(), []

    def _may_touch(self, request: HttpRequest, obj: User | None) -> bool:
        if obj is None or to_actor(request.user).is_operator or obj == request.user:
            return True
        return not (obj.is_staff or obj.is_superuser)
