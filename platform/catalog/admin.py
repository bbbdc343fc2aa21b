"""Served models and their replicas in Django's admin."""

from django.contrib import admin

from catalog import actions
from catalog.models import McpServer, Replica, ServedModel
from tenants.admin import ActionsAdmin, ReadOnlyInline, row_action
from tenants.models import User


class ReplicaInline(ReadOnlyInline):
    model = Replica
    fields = ("replica_id", "state", "detail", "pid", "restarts", "last_seen")


@admin.register(ServedModel)
class ServedModelAdmin(ActionsAdmin):
    """Served models. The console adds and changes them."""

    console_page = "models"
    list_display = (
        *("name", "source", "desired_state", "num_replicas"),
        *("max_model_len", "public", "node", "changed_at"),
    )
    list_filter = ("desired_state", "public", "managed")
    search_fields = ("name", "source")
    fields = (
        *("name", "source", "num_replicas", "num_spares", "num_prefill", "num_encode"),
        *("idle_minutes", "node", "managed", "public", "tenants", "aliases", "fallbacks"),
        "settings",
        *("desired_state", "max_model_len", "created_at", "changed_at"),
    )
    inlines = (ReplicaInline,)
    actions = ("load", "unload")

    @row_action("Load selected models", done="models are being loaded")
    def load(self, actor: User, model: ServedModel) -> None:
        actions.load_model(actor=actor, name=model.name)

    @row_action("Unload selected models", done="models are being unloaded")
    def unload(self, actor: User, model: ServedModel) -> None:
        actions.unload_model(actor=actor, model=model)


@admin.register(Replica)
class ReplicaAdmin(ActionsAdmin):
    console_page = "models"
    list_display = ("replica_id", "served_model", "state", "host", "pid", "restarts", "last_seen")
    list_filter = ("state", "served_model")
    search_fields = ("replica_id", "served_model__name", "detail")
    list_select_related = ("served_model",)
    actions = ("drain",)

    @row_action("Drain and restart selected replicas", done="replicas are being drained")
    def drain(self, actor: User, replica: Replica) -> None:
        actions.drain_replica(actor=actor, replica=replica)


@admin.register(McpServer)
class McpServerAdmin(ActionsAdmin):
    """MCP servers. The console adds and changes them."""

    console_page = "mcp-servers"
    list_display = ("name", "url", "public", "tested_at", "error")
    search_fields = ("name", "url")
    fields = ("name", "url", "public", "tenants", "tools", "tested_at", "error")
