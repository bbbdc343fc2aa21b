"""The audit log."""

from django.contrib import admin

from tenants.admin.base import ReadOnlyAdmin
from tenants.models import AuditEntry


@admin.register(AuditEntry)
class AuditEntryAdmin(ReadOnlyAdmin):
    """Who did what to what, when."""

    list_display = ("at", "actor_label", "actor_kind", "address", "action", "target_type")
    list_display += ("target_label", "tenant")
    list_filter = ("action", "actor_kind", "target_type", "tenant")
    search_fields = ("actor_label", "action", "address", "target_label", "target_id")
    search_fields += ("tenant__slug",)
    exclude = ("actor", "actor_key")  # their rows may be gone; the label stays
    list_select_related = ("tenant",)
    date_hierarchy = "at"
