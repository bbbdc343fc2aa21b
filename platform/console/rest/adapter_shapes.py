"""What the management API shows and takes of adapters."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from adapters import actions
from adapters.models import Adapter, AdapterAlias, AdapterUpload, AdapterVersion
from adapters.room import most_of_one
from metering.models import UsageEntry

#: What one piece of an upload may have; larger files come in several.
MAX_PIECE_BYTES = 32 << 20


class VersionSerializer(serializers.ModelSerializer):
    """A version with what its check found."""

    report = serializers.SerializerMethodField()
    source = serializers.SerializerMethodField()
    error = serializers.CharField(source="problem", read_only=True)

    class Meta:
        model = AdapterVersion
        fields = ("number", "state", "digest", "rank", "num_bytes", "source", "error", "report")
        fields += ("created_by", "created_at")

    def get_report(self, version: AdapterVersion) -> dict[str, Any]:
        """The check's own words."""
        return dict(version.report or {})

    def get_source(self, version: AdapterVersion) -> str:
        """Where it came from; a path on the server is for operators alone."""
        hidden = version.source.startswith("/") and not self.context.get("operator")
        return "the server" if hidden else version.source


class AliasSerializer(serializers.ModelSerializer):
    """A name that clients send, and the versions that answer, by their numbers."""

    version = serializers.IntegerField(source="version.number", default=None, read_only=True)
    canary = serializers.IntegerField(source="canary.number", default=None, read_only=True)
    previous = serializers.IntegerField(source="previous.number", default=None, read_only=True)
    digest = serializers.CharField(source="version.digest", default=None, read_only=True)

    class Meta:
        model = AdapterAlias
        fields = ("name", "version", "digest", "canary", "canary_percent", "previous", "changed_at")


class AdapterSerializer(serializers.ModelSerializer):
    """An adapter with its names and versions."""

    model = serializers.CharField(source="served_model.name", read_only=True)
    tenant = serializers.CharField(source="tenant.slug", default=None, read_only=True)
    shared = serializers.SerializerMethodField()
    aliases = AliasSerializer(many=True, read_only=True)
    versions = VersionSerializer(many=True, read_only=True)

    class Meta:
        model = Adapter
        fields = ("id", "name", "model", "tenant", "shared", "description", "pinned", "aliases")
        fields += ("versions", "created_at")

    def get_shared(self, adapter: Adapter) -> bool:
        """Whether all who may use the model may use it."""
        return adapter.tenant_id is None


class NewAdapterSerializer(serializers.Serializer):
    """Where a version comes from: `repository` on the hub, or (for operators) `path`."""

    model = serializers.CharField(max_length=200)
    name = serializers.CharField(max_length=100)
    description = serializers.CharField(
        max_length=300, required=False, default="", allow_blank=True
    )
    path = serializers.CharField(max_length=1000, required=False, default="")
    repository = serializers.CharField(max_length=300, required=False, default="")
    promote = serializers.BooleanField(required=False, default=False)


class PromotionSerializer(serializers.Serializer):
    """Which version, under which name ("": the adapter's own), for how many of 100 requests."""

    version = serializers.IntegerField(min_value=1)
    alias = serializers.CharField(max_length=100, required=False, default="", allow_blank=True)
    percent = serializers.IntegerField(required=False, default=100)


class AliasNameSerializer(serializers.Serializer):
    """ "": the adapter's own name."""

    alias = serializers.CharField(max_length=100, required=False, default="", allow_blank=True)


class NewUploadSerializer(serializers.Serializer):
    """What will come. `files`: name -> bytes."""

    model = serializers.CharField(max_length=200)
    name = serializers.CharField(max_length=100)
    description = serializers.CharField(
        max_length=300, required=False, default="", allow_blank=True
    )
    files = serializers.DictField(child=serializers.IntegerField(min_value=1), allow_empty=False)
    promote = serializers.BooleanField(required=False, default=False)


class UploadSerializer(serializers.ModelSerializer):
    """How much of each file is there."""

    id = serializers.CharField(source="public_id", read_only=True)
    model = serializers.CharField(source="served_model.name", read_only=True)
    files = serializers.SerializerMethodField()
    max_piece_bytes = serializers.SerializerMethodField()
    max_bytes = serializers.SerializerMethodField()

    class Meta:
        model = AdapterUpload
        fields = ("id", "model", "name", "files", "max_piece_bytes", "max_bytes", "created_at")

    def get_files(self, upload: AdapterUpload) -> dict[str, dict[str, int]]:
        """`{name: {"bytes", "offset"}}`: so many there shall be, so many there are."""
        there = actions.offsets(upload)
        return {name: {"bytes": size, "offset": there[name]} for name, size in upload.files.items()}

    def get_max_piece_bytes(self, upload: AdapterUpload) -> int:
        """Of one request."""
        return MAX_PIECE_BYTES

    def get_max_bytes(self, upload: AdapterUpload) -> int:
        """Of one adapter."""
        return most_of_one()


class RequestSerializer(serializers.ModelSerializer):
    """One request of the ledger's."""

    id = serializers.CharField(source="request_id", read_only=True)

    class Meta:
        model = UsageEntry
        fields = ("id", "endpoint", "model", "adapter", "adapter_digest", "status", "finish_reason")
        fields += ("prompt_tokens", "cached_tokens", "completion_tokens", "started_at", "ttft_ms")
        fields += ("duration_ms", "stream", "api_key_id")
