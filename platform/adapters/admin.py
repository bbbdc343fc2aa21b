"""Adapters, their versions and aliases in Django's admin."""

from django.contrib import admin

from adapters import actions
from adapters.models import Adapter, AdapterAlias, AdapterUpload, AdapterVersion
from tenants.admin import ActionsAdmin, ReadOnlyInline, ReadOnlyModelAdmin, row_action
from tenants.models import User


class VersionInline(ReadOnlyInline):
    model = AdapterVersion
    show_change_link = True
    fields = ("number", "state", "short_digest", "rank", "num_bytes", "source")


class AliasInline(ReadOnlyInline):
    model = AdapterAlias
    fields = ("name", "version", "canary", "canary_percent", "previous")


@admin.register(Adapter)
class AdapterAdmin(ActionsAdmin):
    """Adapters of all tenants. They are uploaded in the console or by the API."""

    console_page = "adapters"
    list_display = ("name", "served_model", "tenant", "pinned", "created_at", "changed_at")
    list_filter = ("served_model", "tenant", "pinned")
    search_fields = ("name", "tenant__slug", "served_model__name", "versions__digest")
    list_select_related = ("tenant", "served_model")
    fields = ("name", "served_model", "tenant", "description", "pinned", "created_at", "changed_at")
    inlines = (AliasInline, VersionInline)
    actions = ("promote", "rollback", "take_offline")

    @row_action("Promote the newest version that passed", done="promoted")
    def promote(self, actor: User, adapter: Adapter) -> None:
        newest = actions.latest_valid_version(adapter)
        if newest is None:
            raise actions.no_valid_version_error(adapter)
        actions.promote(actor=actor, version=newest)

    @row_action("Roll back to the version before", done="rolled back")
    def rollback(self, actor: User, adapter: Adapter) -> None:
        actions.rollback(actor=actor, alias=adapter.aliases.get(name=adapter.name))

    @row_action("Take offline", done="taken offline")
    def take_offline(self, actor: User, adapter: Adapter) -> None:
        actions.take_offline(actor=actor, adapter=adapter)


@admin.register(AdapterVersion)
class AdapterVersionAdmin(ActionsAdmin):
    console_page = "adapters"
    list_display = (
        *("adapter", "number", "state", "short_digest"),
        *("rank", "num_bytes", "created_by", "created_at"),
    )
    list_filter = ("state", "adapter__served_model", "adapter__tenant")
    search_fields = ("digest", "adapter__name", "source")
    list_select_related = ("adapter__served_model", "adapter__tenant")
    actions = ("check_again", "promote", "retire")

    @row_action("Check selected versions again", done="versions wait for their check")
    def check_again(self, actor: User, version: AdapterVersion) -> None:
        actions.revalidate_version(actor=actor, version=version)

    @row_action("Promote selected versions", done="versions promoted")
    def promote(self, actor: User, version: AdapterVersion) -> None:
        actions.promote(actor=actor, version=version)

    @row_action("Retire selected versions", done="versions retired")
    def retire(self, actor: User, version: AdapterVersion) -> None:
        actions.retire_version(actor=actor, version=version)


@admin.register(AdapterUpload)
class AdapterUploadAdmin(ReadOnlyModelAdmin):
    console_page = "adapters"
    list_display = ("public_id", "name", "served_model", "tenant", "num_bytes", "touched_at")
    list_select_related = ("served_model", "tenant")
