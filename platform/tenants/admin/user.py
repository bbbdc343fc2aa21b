"""Users."""

from copy import copy
from functools import partial
from typing import Any

from django.contrib import admin
from django.contrib.auth.admin import UserAdmin as DjangoUserAdmin
from django.contrib.auth.forms import AdminPasswordChangeForm
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse

from tenants import actions
from tenants.actions.users import PROFILE, STANDING
from tenants.actors import as_actor
from tenants.admin.base import ActionsAdmin
from tenants.models import Membership, User

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
        if as_actor(request.user).is_operator:
            return self.readonly_fields
        return (*self.readonly_fields, *STANDING, *RIGHTS)

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
                name: values[name] for name in (*PROFILE, *STANDING) if name in form.changed_data
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
        if obj is None or as_actor(request.user).is_operator or obj == request.user:
            return True
        return not (obj.is_staff or obj.is_superuser)
