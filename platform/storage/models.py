"""Files, batches, uploads, conversations, responses and chat completions that tenants store."""

from __future__ import annotations

import json
from typing import Any

from django.conf import settings
from django.db import models

from tenants.models import ApiKey, Tenant


def json_chars(*values: Any) -> int:
    """Characters that the values take in columns of this kind."""
    return sum(len(json.dumps(value)) for value in values)


class JsonTextField(models.TextField):
    """Any JSON value, stored as ASCII text.

    PostgreSQL's JSON type can't store NUL characters, which clients may send; here they are stored
    as escape sequences. Nothing queries inside these columns, so nothing is lost.
    """

    # The types that django-stubs gives the column's attribute.
    _pyi_private_set_type: Any
    _pyi_private_get_type: Any

    def from_db_value(self, value: str | None, expression: Any, connection: Any) -> Any:
        """Text from the database."""
        return None if value is None else json.loads(value)

    def to_python(self, value: Any) -> Any:
        """Values are Python objects already, except in fixtures and forms."""
        return json.loads(value) if isinstance(value, str) else value

    def get_prep_value(self, value: Any) -> str:
        """A value for the database."""
        return json.dumps(value)

    def value_to_string(self, obj: models.Model) -> str:
        """The value as text, for `dumpdata`."""
        return json.dumps(self.value_from_object(obj))


class Owned(models.Model):
    """A tenant's object. `key` and `user`: its creator, until they are deleted."""

    public_id = models.CharField(max_length=64, unique=True, editable=False)
    tenant = models.ForeignKey(Tenant, models.PROTECT, related_name="+")
    key = models.ForeignKey(ApiKey, models.SET_NULL, null=True, blank=True, related_name="+")
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, blank=True, related_name="+"
    )
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField(null=True, blank=True, db_index=True)

    class Meta:
        abstract = True
        ordering = ["-created_at", "-pk"]

    def __str__(self) -> str:
        return self.public_id


class Leased(models.Model):
    """Work that one worker at a time may do, until its lease expires."""

    lease_owner = models.CharField(max_length=64, blank=True, editable=False)
    lease_until = models.DateTimeField(null=True, blank=True, editable=False)

    class Meta:
        abstract = True


class StoredCompletion(Owned):
    """A chat completion and its request.

    `messages`: the request's, each with an id. `body`: the response. `metadata`: the client's,
    which it may change. `size`: of messages and body in characters.
    """

    model = models.CharField(max_length=256)
    messages = JsonTextField()
    metadata = JsonTextField(default=dict, blank=True)
    body = JsonTextField()
    size = models.PositiveBigIntegerField(default=0, editable=False)

    class Meta(Owned.Meta):
        verbose_name = "chat completion"
        indexes = [models.Index(fields=["tenant", "model"], name="completion_model")]


MAX_TITLE_CHARS = 200
MAX_FOLDER_CHARS = 60


class SavedConversation(Owned):
    """A user's conversation in a tenant, deleted with the user.

    `document`: its turns as a tree, see `storage.playground_document`. `folder`: the user's name
    for a group of conversations, "" for none. `words`: searchable text in lower case. `version`:
    counts the changes, so that two tabs don't overwrite each other's. `size`: of document and words
    in characters. `shared_at`: since when the tenant's members may read it.
    """

    user = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, related_name="+")
    title = models.CharField(max_length=MAX_TITLE_CHARS)
    folder = models.CharField(max_length=MAX_FOLDER_CHARS, blank=True)
    document = JsonTextField()
    words = models.TextField(editable=False)
    version = models.PositiveIntegerField(default=1, editable=False)
    size = models.PositiveBigIntegerField(default=0, editable=False)
    changed_at = models.DateTimeField(db_index=True)
    shared_at = models.DateTimeField(null=True, blank=True)

    class Meta(Owned.Meta):
        verbose_name = "conversation"
        indexes = [
            models.Index(fields=["user", "tenant", "-changed_at"], name="conversation_newest")
        ]


MAX_PRESET_NAME_CHARS = 100


class PlaygroundPreset(Owned):
    """A prompt and settings of the playground, for all members of a tenant.

    `prompt`: text of a message, "" for none. `options`: model, system prompt, tools, answer schema
    and sampling, see `storage.playground_document.PresetOptions`; empty for a prompt alone.
    """

    name = models.CharField(max_length=MAX_PRESET_NAME_CHARS)
    prompt = models.TextField(blank=True)
    options = JsonTextField(default=dict, blank=True)

    class Meta(Owned.Meta):
        verbose_name = "preset"
        ordering = ["name"]
        constraints = [models.UniqueConstraint(fields=["tenant", "name"], name="preset_name")]

    def __str__(self) -> str:
        return self.name


class StoredFile(Owned):
    """A tenant's file; its bytes are in `storage.blobs` under the same public id.

    `filename` is the client's name for it, displayed but never opened.
    """

    filename = models.CharField(max_length=255)
    purpose = models.CharField(max_length=40)
    size = models.PositiveBigIntegerField()

    class Meta(Owned.Meta):
        verbose_name = "file"
        indexes = [models.Index(fields=["tenant", "-created_at", "-id"], name="file_newest")]


class BatchStatus(models.TextChoices):
    """Statuses as in OpenAI's API."""

    VALIDATING = "validating", "Validating"
    FAILED = "failed", "Failed"
    IN_PROGRESS = "in_progress", "In progress"
    FINALIZING = "finalizing", "Finalizing"
    COMPLETED = "completed", "Completed"
    EXPIRED = "expired", "Expired"
    CANCELLING = "cancelling", "Cancelling"
    CANCELLED = "cancelled", "Cancelled"


#: Statuses in which a worker has something to do.
OPEN = (
    BatchStatus.VALIDATING,
    BatchStatus.IN_PROGRESS,
    BatchStatus.FINALIZING,
    BatchStatus.CANCELLING,
)


class Batch(Owned, Leased):
    """The requests of one file. `expires_at` is the end of its completion window."""

    endpoint = models.CharField(max_length=100)
    completion_window = models.CharField(max_length=10)
    status = models.CharField(
        max_length=12, choices=BatchStatus, default=BatchStatus.VALIDATING, db_index=True
    )
    metadata = JsonTextField(default=dict, blank=True)
    errors = JsonTextField(default=list, blank=True)
    usage = JsonTextField(default=dict, blank=True)
    input_file_id = models.CharField(max_length=64)
    output_file = models.ForeignKey(
        StoredFile, models.SET_NULL, null=True, blank=True, related_name="+"
    )
    error_file = models.ForeignKey(
        StoredFile, models.SET_NULL, null=True, blank=True, related_name="+"
    )
    output_lifetime_s = models.PositiveBigIntegerField(null=True, blank=True)
    total = models.PositiveIntegerField(default=0)
    completed = models.PositiveIntegerField(default=0)
    failed = models.PositiveIntegerField(default=0)
    #: Number of failed requests that weren't run in time.
    expired = models.PositiveIntegerField(default=0)
    in_progress_at = models.DateTimeField(null=True, blank=True)
    finalizing_at = models.DateTimeField(null=True, blank=True)
    completed_at = models.DateTimeField(null=True, blank=True)
    failed_at = models.DateTimeField(null=True, blank=True)
    expired_at = models.DateTimeField(null=True, blank=True)
    cancelling_at = models.DateTimeField(null=True, blank=True)
    cancelled_at = models.DateTimeField(null=True, blank=True)

    class Meta(Owned.Meta):
        verbose_name_plural = "batches"
        indexes = [models.Index(fields=["tenant", "-created_at", "-id"], name="batch_newest")]


class ItemConversation(Owned):
    """A tenant's conversation, whichever of its keys created it; see also `SavedConversation`.

    `metadata`: the client's. `size`: of all items in characters. `changed_at`: its retention starts
    then.
    """

    metadata = JsonTextField(default=dict, blank=True)
    size = models.PositiveBigIntegerField(default=0, editable=False)
    changed_at = models.DateTimeField(db_index=True)

    class Meta(Owned.Meta):
        verbose_name = "conversation of items"
        verbose_name_plural = "conversations of items"


class ConversationItem(models.Model):
    """One item, in OpenAI's form. Its id is unique only within its conversation."""

    conversation = models.ForeignKey(ItemConversation, models.CASCADE, related_name="items")
    public_id = models.CharField(max_length=64, editable=False)
    item = JsonTextField()
    size = models.PositiveBigIntegerField(editable=False)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["pk"]
        constraints = [
            models.UniqueConstraint(
                fields=["conversation", "public_id"], name="conversation_item_id"
            )
        ]

    def __str__(self) -> str:
        return self.public_id


class ResponseStatus(models.TextChoices):
    """Statuses as in OpenAI's API."""

    QUEUED = "queued", "Queued"
    IN_PROGRESS = "in_progress", "In progress"
    COMPLETED = "completed", "Completed"
    INCOMPLETE = "incomplete", "Incomplete"
    FAILED = "failed", "Failed"
    CANCELLED = "cancelled", "Cancelled"


class StoredResponse(Owned, Leased):
    """A response and its request.

    `request`: the request's body. `input_items`: this turn's input, as OpenAI's items. `body`: the
    response object as last written. `previous_id`: the response that it continues. `size`: of all
    these in characters.
    """

    status = models.CharField(max_length=12, choices=ResponseStatus, db_index=True)
    background = models.BooleanField(default=False)
    request = JsonTextField()
    input_items = JsonTextField()
    body = JsonTextField()
    previous_id = models.CharField(max_length=64, blank=True)
    size = models.PositiveBigIntegerField(default=0, editable=False)

    class Meta(Owned.Meta):
        verbose_name = "response"


class UploadStatus(models.TextChoices):
    """Statuses as in OpenAI's API; an upload that wasn't completed in time is deleted."""

    PENDING = "pending", "Pending"
    COMPLETED = "completed", "Completed"
    CANCELLED = "cancelled", "Cancelled"


class StoredUpload(Owned):
    """A file that is being uploaded in parts. `size`: announced size of the complete file.
    `lifetime_s`: of the file, once complete; None for no expiry. `expires_at`: of the upload.
    """

    filename = models.CharField(max_length=255)
    purpose = models.CharField(max_length=40)
    mime_type = models.CharField(max_length=255)
    size = models.PositiveBigIntegerField()
    lifetime_s = models.PositiveBigIntegerField(null=True, blank=True)
    status = models.CharField(
        max_length=10, choices=UploadStatus, default=UploadStatus.PENDING, db_index=True
    )
    file = models.ForeignKey(StoredFile, models.SET_NULL, null=True, blank=True, related_name="+")

    class Meta(Owned.Meta):
        verbose_name = "upload"


class UploadPart(models.Model):
    """A part of an upload. Its bytes are in `storage.blobs`, under its public id."""

    upload = models.ForeignKey(StoredUpload, models.CASCADE, related_name="parts")
    public_id = models.CharField(max_length=64, unique=True, editable=False)
    size = models.PositiveBigIntegerField()
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["pk"]

    def __str__(self) -> str:
        return self.public_id
