"""API keys: made here, shown once, revoked."""

from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils import timezone
from django.views.decorators.cache import never_cache

from tenants import actions, scopes
from tenants.admin.base import ActionsAdmin
from tenants.models import ApiKey
from tenants.shown_once import keep, take

FIELDS = ("tenant", "name", "scopes", "expires_at", *actions.NARROWED)


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
        keep(request, key=made.key.pk, secret=made.secret)
        return HttpResponseRedirect(reverse("admin:tenants_apikey_created"))

    def get_urls(self) -> list[Any]:
        """The page of a new key besides."""
        view = self.admin_site.admin_view(never_cache(self.created))
        return [path("created/", view, name="tenants_apikey_created"), *super().get_urls()]

    def created(self, request: HttpRequest) -> HttpResponse:
        """A new key with its secret, once; then the list."""
        kept = take(request)
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
