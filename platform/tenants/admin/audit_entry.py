"""The audit log."""

from django.contrib import admin

from tenants.admin.base import ReadOnlyAdmin
from tenants.models import AuditEntry


@admin.register(AuditEntry)
class AuditEntryAdmin(ReadOnlyAdmin):
    """Who did what to what, when."""

    list_display = ("at", "actor_label", "action", "target_type", "target_label", "tenant")
    list_filter = ("action", "target_type", "tenant")
    search_fields = ("actor_label", "action", "target_label", "target_id", "tenant__slug")
    list_select_related = ("tenant", "actor")
    date_hierarchy = "at"
