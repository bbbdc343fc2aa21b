"""Stored objects in Django's admin: metadata, not contents."""

from django.contrib import admin

from storage.models import (
    Batch,
    ItemConversation,
    PlaygroundPreset,
    SavedConversation,
    StoredCompletion,
    StoredFile,
    StoredResponse,
    StoredUpload,
)
from tenants.admin import ReadOnlyModelAdmin


@admin.register(StoredFile)
class StoredFileAdmin(ReadOnlyModelAdmin):
    console_page = "files"
    list_display = ("public_id", "tenant", "filename", "purpose", "size", "created_at")
    list_filter = ("purpose", "tenant")
    search_fields = ("public_id", "filename", "tenant__slug")
    list_select_related = ("tenant",)


@admin.register(Batch)
class BatchAdmin(ReadOnlyModelAdmin):
    console_page = "batches"
    list_display = (
        "public_id", "tenant", "endpoint", "status", "total", "completed", "failed", "created_at",
    )  # fmt: skip
    list_filter = ("status", "tenant")
    search_fields = ("public_id", "tenant__slug")
    list_select_related = ("tenant",)


@admin.register(StoredResponse)
class StoredResponseAdmin(ReadOnlyModelAdmin):
    """Stored responses. The content is the tenant's alone."""

    list_display = ("public_id", "tenant", "status", "background", "created_at", "expires_at")
    list_filter = ("status", "background", "tenant")
    search_fields = ("public_id", "tenant__slug")
    list_select_related = ("tenant",)
    exclude = ("request", "input_items", "body")


@admin.register(StoredCompletion)
class StoredCompletionAdmin(ReadOnlyModelAdmin):
    """Stored chat completions. The content is the tenant's alone."""

    list_display = ("public_id", "tenant", "model", "created_at", "expires_at")
    list_filter = ("tenant",)
    search_fields = ("public_id", "tenant__slug")
    list_select_related = ("tenant",)
    exclude = ("messages", "body", "metadata")


@admin.register(SavedConversation)
class SavedConversationAdmin(ReadOnlyModelAdmin):
    """Conversations of the playground. Content and titles are their owner's alone."""

    list_display = ("public_id", "tenant", "user", "size", "changed_at", "expires_at", "shared_at")
    list_filter = ("tenant",)
    search_fields = ("public_id", "tenant__slug", "user__username")
    list_select_related = ("tenant", "user")
    exclude = ("title", "document", "words")


@admin.register(PlaygroundPreset)
class PlaygroundPresetAdmin(ReadOnlyModelAdmin):
    """Presets of the playground. The content is the tenant's alone."""

    list_display = ("public_id", "tenant", "user", "created_at")
    list_filter = ("tenant",)
    search_fields = ("public_id", "tenant__slug", "user__username")
    list_select_related = ("tenant", "user")
    exclude = ("name", "prompt", "options")


@admin.register(ItemConversation)
class ItemConversationAdmin(ReadOnlyModelAdmin):
    """Conversations of the API. The content is the tenant's alone."""

    list_display = ("public_id", "tenant", "size", "changed_at", "expires_at")
    list_filter = ("tenant",)
    search_fields = ("public_id", "tenant__slug")
    list_select_related = ("tenant",)
    exclude = ("metadata",)


@admin.register(StoredUpload)
class StoredUploadAdmin(ReadOnlyModelAdmin):
    list_display = ("public_id", "tenant", "filename", "status", "size", "created_at", "expires_at")
    list_filter = ("status", "tenant")
    search_fields = ("public_id", "filename", "tenant__slug")
    list_select_related = ("tenant",)
