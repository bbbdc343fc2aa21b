"""Served models and their replicas."""

from typing import Any

from django import forms
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db.models import Count, Q, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html, format_html_join

from catalog import actions
from catalog.models import Replica, ReplicaState, ServedModel
from engine.contract.errors import InvalidRequest
from tenants.admin import ActionsAdmin, ReadOnlyModelAdmin

COLUMNS = ("source", "num_replicas", "num_spares", "idle_minutes", "node", "managed", "public")


class ServedModelForm(forms.ModelForm):
    """Says beside the field what is wrong with a folder."""

    class Meta:
        model = ServedModel
        fields = ("name", *COLUMNS, "tenants")

    def clean_source(self) -> str:
        """The folder's absolute path, or the hub id."""
        try:
            return actions.check_source(self.cleaned_data["source"])
        except InvalidRequest as error:
            raise ValidationError(error.message) from error


class NodeFilter(admin.AllValuesFieldListFilter):
    """By node; a model without one runs on all."""

    def choices(self, changelist: Any) -> Any:
        """Django's, with a word where there is no node."""
        for choice in super().choices(changelist):
            yield {**choice, "display": choice["display"] or "every node"}


class ReplicaInline(admin.TabularInline):
    """The model's replicas as last seen."""

    model = Replica
    extra = 0
    can_delete = False
    fields = readonly_fields = ("replica_id", "state", "detail", "pid", "restarts", "last_seen")

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(ServedModel)
class ServedModelAdmin(ActionsAdmin):
    """What is served. Adding a model loads it."""

    form = ServedModelForm
    list_display = (
        "name",
        "source",
        "desired_state",
        "ready",
        "max_model_len",
        "public",
        "node",
        "changed_at",
    )
    list_filter = ("desired_state", "public", "managed", ("node", NodeFilter))
    search_fields = ("name", "source")
    filter_horizontal = ("tenants",)
    readonly_fields = ("desired_state", "max_model_len", "created_at", "changed_at")
    readonly_fields += ("engine_settings", "other_names")
    inlines = (ReplicaInline,)
    actions = ("load", "unload")

    def get_fields(self, request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        """What is read only has no place on the form of a new model."""
        fields = ("name", *COLUMNS, "tenants")
        return fields if obj is None else (*fields, *self.readonly_fields)

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        """Clients know the model by its name: it stays."""
        return self.readonly_fields if obj is None else (*self.readonly_fields, "name")

    def get_queryset(self, request: HttpRequest) -> QuerySet[ServedModel]:
        """With the number of replicas that serve."""
        serving = Q(replicas__state=ReplicaState.READY)
        return super().get_queryset(request).annotate(num_ready=Count("replicas", filter=serving))

    @admin.display(description="engine settings")
    def engine_settings(self, model: ServedModel) -> str:
        """Those that differ from the defaults; the console has a field for each."""
        pairs = format_html_join(", ", "<code>{}</code> {}", sorted(model.settings.items()))
        page = reverse("model-settings", args=[model.pk])
        shown = pairs or "all of the defaults"
        return format_html('{} (<a href="{}">change them in the console</a>)', shown, page)

    @admin.display(description="other names, fallbacks")
    def other_names(self, model: ServedModel) -> str:
        """In words."""
        names = ", ".join(model.aliases) or "no other name"
        return f"{names}; " + (", then ".join(model.fallbacks) or "no fallback")

    @admin.display(ordering="num_ready", description="ready replicas")
    def ready(self, model: Any) -> str:
        """Ready ones of those wanted."""
        return f"{model.num_ready} of {model.num_replicas + model.num_spares}"

    def save_model(self, request: HttpRequest, obj: ServedModel, form: Any, change: bool) -> None:
        """Through the actions."""
        values = {name: form.cleaned_data[name] for name in COLUMNS}
        if change:
            actions.update_model(actor=request.user, model=obj, **values)
            return
        made = actions.load_model(actor=request.user, name=obj.name, **values)
        obj.pk = made.pk

    def save_related(self, request: HttpRequest, form: Any, formsets: Any, change: bool) -> None:
        """Which tenants may use it, through the action. The replicas' rows are only shown."""
        for formset in formsets:
            self.save_formset(request, form, formset, change=change)
        if {"tenants", "public"} & set(form.changed_data):
            actions.share_model(
                actor=request.user,
                model=form.instance,
                tenants=form.cleaned_data["tenants"],
                public=form.cleaned_data["public"],
            )

    def get_deleted_objects(
        self, objs: Any, request: HttpRequest
    ) -> tuple[list[Any], dict[str, int], set[str], list[Any]]:
        """Rows of replicas go with their model, though nobody may delete one by itself."""
        listed, counts, forbidden, protected = super().get_deleted_objects(objs, request)
        return listed, counts, forbidden - {str(Replica._meta.verbose_name)}, protected

    def delete_model(self, request: HttpRequest, obj: ServedModel) -> None:
        """Through the action: a loaded model stays."""
        actions.delete_model(actor=request.user, model=obj)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[ServedModel]) -> None:
        """One by one."""
        self.each(request, queryset, lambda row: self.delete_model(request, row), "models deleted")

    @admin.action(description="Load selected models")
    def load(self, request: HttpRequest, rows: QuerySet[ServedModel]) -> None:
        """Have them served."""
        self.each(
            request,
            rows,
            lambda row: actions.load_model(actor=request.user, name=row.name),
            "models are being loaded",
        )

    @admin.action(description="Unload selected models")
    def unload(self, request: HttpRequest, rows: QuerySet[ServedModel]) -> None:
        """Drain and stop them."""
        self.each(
            request,
            rows,
            lambda row: actions.unload_model(actor=request.user, model=row),
            "models are being unloaded",
        )


@admin.register(Replica)
class ReplicaAdmin(ReadOnlyModelAdmin, ActionsAdmin):
    """Replicas as last seen."""

    list_display = ("replica_id", "served_model", "state", "host", "pid", "restarts", "last_seen")
    list_display += ("short_detail",)
    list_filter = ("state", "host", "served_model")
    search_fields = ("replica_id", "served_model__name", "detail")
    list_select_related = ("served_model",)
    actions = ("drain",)

    @admin.display(description="detail")
    def short_detail(self, replica: Replica) -> str:
        """The start of what is wrong, if anything is."""
        return replica.detail[:120]

    @admin.action(description="Drain and restart selected replicas", permissions=["view"])
    def drain(self, request: HttpRequest, rows: QuerySet[Replica]) -> None:
        """Their streams finish first."""
        self.each(
            request,
            rows,
            lambda row: actions.drain_replica(actor=request.user, replica=row),
            "replicas are being drained",
        )
