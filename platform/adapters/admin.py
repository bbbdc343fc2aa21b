"""Adapters in Django's admin. Writes go through the actions."""

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.template.defaultfilters import filesizeformat

from adapters import actions
from adapters.models import Adapter, AdapterAlias, AdapterUpload, AdapterVersion
from tenants.admin import ActionsAdmin, ReadOnlyModelAdmin


class VersionInline(admin.TabularInline):
    """The adapter's versions, newest first."""

    model = AdapterVersion
    extra = 0
    can_delete = False
    show_change_link = True
    fields = readonly_fields = ("number", "state", "short_digest", "rank", "num_bytes", "source")

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class AliasInline(admin.TabularInline):
    """What clients send, and which version answers."""

    model = AdapterAlias
    extra = 0
    can_delete = False
    fields = readonly_fields = ("name", "version", "canary", "canary_percent", "previous")

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(Adapter)
class AdapterAdmin(ActionsAdmin):
    """Adapters of all tenants. They are made by uploads, in the console or by API."""

    list_display = ("name", "served_model", "whose", "live", "num_versions", "pinned")
    list_display += ("changed_at",)
    list_filter = ("served_model", "tenant", "pinned")
    search_fields = ("name", "tenant__slug", "served_model__name", "versions__digest")
    list_select_related = ("tenant", "served_model")
    fields = readonly_fields = (
        *("name", "served_model", "tenant", "description", "pinned", "created_at", "changed_at"),
    )
    inlines = (AliasInline, VersionInline)
    actions = ("promote", "rollback", "take_offline")

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Adapter]:
        """With what the list shows."""
        return super().get_queryset(request).prefetch_related("versions", "aliases__version")

    @admin.display(ordering="tenant", description="of")
    def whose(self, adapter: Adapter) -> str:
        """Its tenant."""
        return adapter.owner or "everybody"

    @admin.display(description="live")
    def live(self, adapter: Adapter) -> str:
        """Each name with its version."""
        served = [alias for alias in adapter.aliases.all() if alias.version is not None]
        return ", ".join(f"{a.name}: version {a.version.number}" for a in served) or "–"

    @admin.display(description="versions")
    def num_versions(self, adapter: Adapter) -> int:
        """How many there are."""
        return len(adapter.versions.all())

    def delete_model(self, request: HttpRequest, obj: Adapter) -> None:
        """Through the action: a live adapter stays."""
        actions.delete_adapter(actor=request.user, adapter=obj)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Adapter]) -> None:
        """One by one."""
        self.each(request, queryset, lambda row: self.delete_model(request, row), "deleted")

    def get_deleted_objects(
        self, objs: Any, request: HttpRequest
    ) -> tuple[list[Any], dict[str, int], set[str], list[Any]]:
        """Versions and aliases go with their adapter."""
        listed, counts, _, _ = super().get_deleted_objects(objs, request)
        return listed, counts, set(), []

    @admin.action(description="Promote the newest version that passed")
    def promote(self, request: HttpRequest, rows: QuerySet[Adapter]) -> None:
        """For all requests, under the adapter's own name."""

        def deed(row: Adapter) -> None:
            newest = actions.latest_valid_version(row)
            if newest is None:
                raise actions.no_valid_version_error(row)
            actions.promote(actor=request.user, version=newest)

        self.each(request, rows, deed, "promoted")

    @admin.action(description="Roll back to the version before")
    def rollback(self, request: HttpRequest, rows: QuerySet[Adapter]) -> None:
        """Under the adapter's own name."""

        def deed(row: Adapter) -> None:
            alias = row.aliases.get(name=row.name)
            actions.rollback(actor=request.user, alias=alias)

        self.each(request, rows, deed, "rolled back")

    @admin.action(description="Take offline")
    def take_offline(self, request: HttpRequest, rows: QuerySet[Adapter]) -> None:
        """All names of it."""
        self.each(
            request,
            rows,
            lambda row: actions.take_offline(actor=request.user, adapter=row),
            "taken offline",
        )


@admin.register(AdapterVersion)
class AdapterVersionAdmin(ReadOnlyModelAdmin, ActionsAdmin):
    """Versions with their reports."""

    list_display = ("adapter", "number", "state", "short_digest", "rank", "size", "created_by")
    list_display += ("created_at",)
    list_filter = ("state", "adapter__served_model", "adapter__tenant")
    search_fields = ("digest", "adapter__name", "source")
    list_select_related = ("adapter__served_model", "adapter__tenant")
    actions = ("check_again", "promote", "retire")

    @admin.display(ordering="num_bytes")
    def size(self, version: AdapterVersion) -> str:
        """For people."""
        return filesizeformat(version.num_bytes)

    @admin.action(description="Check selected versions again", permissions=["view"])
    def check_again(self, request: HttpRequest, rows: QuerySet[AdapterVersion]) -> None:
        """By a worker."""
        self.each(
            request,
            rows,
            lambda row: actions.revalidate_version(actor=request.user, version=row),
            "versions wait for their check",
        )

    @admin.action(description="Promote selected versions", permissions=["view"])
    def promote(self, request: HttpRequest, rows: QuerySet[AdapterVersion]) -> None:
        """For all requests, under the adapter's own name."""
        self.each(
            request,
            rows,
            lambda row: actions.promote(actor=request.user, version=row),
            "versions promoted",
        )

    @admin.action(description="Retire selected versions", permissions=["view"])
    def retire(self, request: HttpRequest, rows: QuerySet[AdapterVersion]) -> None:
        """Nobody promotes them any more."""
        self.each(
            request,
            rows,
            lambda row: actions.retire_version(actor=request.user, version=row),
            "versions retired",
        )


@admin.register(AdapterUpload)
class AdapterUploadAdmin(ReadOnlyModelAdmin):
    """Uploads under way."""

    list_display = ("public_id", "name", "served_model", "tenant", "num_bytes", "touched_at")
    list_select_related = ("served_model", "tenant")
