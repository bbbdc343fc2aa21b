"""Serializers of the management API."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from adapters import actions
from adapters.models import Adapter, AdapterAlias, AdapterUpload, AdapterVersion
from adapters.store import max_adapter_bytes
from metering.models import UsageEntry
from tenants.audit import as_record
from tenants.models import ApiKey, AuditEntry, Invitation, Membership, Role, ServiceAccount, User

#: Maximum size of one chunk of an upload, in bytes.
MAX_PIECE_BYTES = 32 << 20


class AdapterVersionSerializer(serializers.ModelSerializer):
    """A version with the result of its validation."""

    report = serializers.SerializerMethodField()
    source = serializers.SerializerMethodField()  # type: ignore[assignment]  # a JSON field
    error = serializers.CharField(source="problem", read_only=True)

    class Meta:
        model = AdapterVersion
        fields = (
            *("number", "state", "digest", "rank", "num_bytes", "source", "error", "report"),
            *("created_by", "created_at"),
        )

    def get_report(self, version: AdapterVersion) -> dict[str, Any]:
        """Report of the validation."""
        return dict(version.report or {})

    def get_source(self, version: AdapterVersion) -> str:
        """Source of the version; only operators see paths on the server."""
        hidden = version.source.startswith("/") and not self.context.get("operator")
        return "the server" if hidden else version.source


class AdapterAliasSerializer(serializers.ModelSerializer):
    """A name that clients use, and the numbers of the versions that serve it."""

    version = serializers.IntegerField(source="version.number", default=None, read_only=True)
    canary = serializers.IntegerField(source="canary.number", default=None, read_only=True)
    previous = serializers.IntegerField(source="previous.number", default=None, read_only=True)
    digest = serializers.CharField(source="version.digest", default=None, read_only=True)

    class Meta:
        model = AdapterAlias
        fields = ("name", "version", "digest", "canary", "canary_percent", "previous", "changed_at")


class AdapterSerializer(serializers.ModelSerializer):
    """An adapter with its aliases and versions."""

    model = serializers.CharField(source="served_model.name", read_only=True)
    tenant = serializers.CharField(source="tenant.slug", default=None, read_only=True)
    shared = serializers.SerializerMethodField()
    aliases = AdapterAliasSerializer(many=True, read_only=True)
    versions = AdapterVersionSerializer(many=True, read_only=True)

    class Meta:
        model = Adapter
        fields = (
            *("id", "name", "model", "tenant", "shared", "description", "pinned", "aliases"),
            *("versions", "created_at"),
        )

    def get_shared(self, adapter: Adapter) -> bool:
        """Whether all users of the model may use the adapter."""
        return adapter.tenant_id is None


class AdapterCreateSerializer(serializers.Serializer):
    """Source of a version: `repository` on the hub, or (for operators) `path`."""

    model = serializers.CharField(max_length=200)
    name = serializers.CharField(max_length=100)
    description = serializers.CharField(
        max_length=300, required=False, default="", allow_blank=True
    )
    path = serializers.CharField(max_length=1000, required=False, default="")
    repository = serializers.CharField(max_length=300, required=False, default="")
    promote = serializers.BooleanField(required=False, default=False)


class PromotionSerializer(serializers.Serializer):
    """A version to promote. `alias`: "" stands for the adapter's name. `percent`: share of the
    requests.
    """

    version = serializers.IntegerField(min_value=1)
    alias = serializers.CharField(max_length=100, required=False, default="", allow_blank=True)
    percent = serializers.IntegerField(required=False, default=100)


class AliasNameSerializer(serializers.Serializer):
    """`alias`: "" stands for the adapter's name."""

    alias = serializers.CharField(max_length=100, required=False, default="", allow_blank=True)


class AdapterUploadCreateSerializer(serializers.Serializer):
    """Announces an upload. `files`: name -> size in bytes."""

    model = serializers.CharField(max_length=200)
    name = serializers.CharField(max_length=100)
    description = serializers.CharField(
        max_length=300, required=False, default="", allow_blank=True
    )
    files = serializers.DictField(child=serializers.IntegerField(min_value=1), allow_empty=False)
    promote = serializers.BooleanField(required=False, default=False)


class AdapterUploadSerializer(serializers.ModelSerializer):
    """An upload, with the received bytes of each file."""

    id = serializers.CharField(source="public_id", read_only=True)
    model = serializers.CharField(source="served_model.name", read_only=True)
    files = serializers.SerializerMethodField()
    max_piece_bytes = serializers.SerializerMethodField()
    max_bytes = serializers.SerializerMethodField()

    class Meta:
        model = AdapterUpload
        fields = ("id", "model", "name", "files", "max_piece_bytes", "max_bytes", "created_at")

    def get_files(self, upload: AdapterUpload) -> dict[str, dict[str, int]]:
        """`{name: {"bytes": announced size, "offset": number of received bytes}}`."""
        offsets = actions.received_bytes(upload)
        return {
            name: {"bytes": size, "offset": offsets[name]} for name, size in upload.files.items()
        }

    def get_max_piece_bytes(self, upload: AdapterUpload) -> int:
        """Maximum size of one request, in bytes."""
        return MAX_PIECE_BYTES

    def get_max_bytes(self, upload: AdapterUpload) -> int:
        """Maximum size of an adapter, in bytes."""
        return max_adapter_bytes()


class RequestSerializer(serializers.ModelSerializer):
    """A request's ledger entry."""

    id = serializers.CharField(source="request_id", read_only=True)

    class Meta:
        model = UsageEntry
        fields = (
            *("id", "endpoint", "model", "adapter", "adapter_digest", "status", "finish_reason"),
            *("prompt_tokens", "cached_tokens", "completion_tokens", "started_at", "ttft_ms"),
            *("duration_ms", "stream", "api_key_id"),
        )


ROLES = Role.choices


class UserSerializer(serializers.ModelSerializer):
    """A user."""

    class Meta:
        model = User
        fields = (
            *("id", "username", "email", "first_name", "last_name", "is_active", "is_staff"),
            *("is_superuser", "last_login", "date_joined"),
        )
        read_only_fields = ("last_login", "date_joined")
        # The actions check uniqueness while holding a lock.
        extra_kwargs: dict[str, Any] = {"username": {"validators": []}}


class UserCreateSerializer(serializers.Serializer):
    """Create a user. Omit `password` for single sign-on or a password reset."""

    username = serializers.CharField(max_length=150)
    email = serializers.EmailField(required=False, allow_blank=True, default="")
    password = serializers.CharField(required=False, allow_null=True, write_only=True, default=None)
    is_staff = serializers.BooleanField(default=False)
    is_superuser = serializers.BooleanField(default=False)


class PasswordSerializer(serializers.Serializer):
    """A new password; null removes it."""

    password = serializers.CharField(allow_null=True, write_only=True)


class MemberSerializer(serializers.ModelSerializer):
    """A user's membership in the tenant."""

    username = serializers.CharField(source="user.username", read_only=True)
    email = serializers.EmailField(source="user.email", read_only=True)
    is_active = serializers.BooleanField(source="user.is_active", read_only=True)

    class Meta:
        model = Membership
        fields = ("id", "username", "email", "is_active", "role", "created_at")


class MemberCreateSerializer(serializers.Serializer):
    """A user who has an account; others must be invited."""

    username = serializers.CharField(max_length=150)
    role = serializers.ChoiceField(ROLES)


class RoleSerializer(serializers.Serializer):
    """A new role."""

    role = serializers.ChoiceField(ROLES)


class InvitationSerializer(serializers.ModelSerializer):
    """An invitation; `link` is only in the response that creates it."""

    state = serializers.CharField(read_only=True)
    created_by = serializers.CharField(source="created_by.username", read_only=True, default=None)

    class Meta:
        model = Invitation
        fields: tuple[str, ...] = (
            *("id", "email", "role", "state"),
            *("created_by", "created_at", "expires_at"),
        )
        read_only_fields = ("created_at", "expires_at")


class InvitationWithLinkSerializer(InvitationSerializer):
    """An invitation with its link."""

    link = serializers.CharField(read_only=True)
    mailed = serializers.BooleanField(read_only=True)

    class Meta(InvitationSerializer.Meta):
        fields = (*InvitationSerializer.Meta.fields, "link", "mailed")


class ServiceAccountSerializer(serializers.ModelSerializer):
    """A service account of the tenant."""

    class Meta:
        model = ServiceAccount
        fields = ("id", "name", "role", "active", "created_at")
        read_only_fields = ("created_at",)


class ServiceAccountCreateSerializer(serializers.Serializer):
    """A new service account."""

    name = serializers.CharField(max_length=100)
    role = serializers.ChoiceField(ROLES, default=Role.MEMBER)


class ServiceAccountUpdateSerializer(serializers.Serializer):
    """Changes of a service account; omitted fields stay unchanged."""

    name = serializers.CharField(max_length=100, required=False)
    role = serializers.ChoiceField(ROLES, required=False)
    active = serializers.BooleanField(required=False)


class ApiKeySerializer(serializers.ModelSerializer):
    """An API key with its prefix; only the response that created it contains the secret."""

    state = serializers.CharField(read_only=True)
    prefix = serializers.CharField(read_only=True)
    service_account = serializers.CharField(
        source="service_account.name", read_only=True, default=None
    )
    created_by = serializers.CharField(source="created_by.username", read_only=True, default=None)

    class Meta:
        model = ApiKey
        fields: tuple[str, ...] = (
            *("id", "prefix", "name", "state", "scopes", "service_account", "created_by"),
            *("requests_per_minute", "tokens_per_minute", "max_running_requests"),
            *("media_per_minute", "media_bytes_per_minute", "media_seconds_per_minute"),
            *("max_context_tokens", "allowed_models", "endpoints", "addresses"),
            *("created_at", "expires_at", "last_used_at"),
        )


class ApiKeyWithSecretSerializer(ApiKeySerializer):
    """A key with its secret."""

    secret = serializers.CharField(read_only=True)

    class Meta(ApiKeySerializer.Meta):
        fields = (*ApiKeySerializer.Meta.fields, "secret")


class ApiKeyRotationSerializer(serializers.Serializer):
    """Time for which the old key stays valid."""

    overlap_hours = serializers.IntegerField(min_value=0, max_value=720, default=24)


class AuditEntrySerializer(serializers.ModelSerializer):
    """An audit entry: actor, target, address, and values before and after."""

    class Meta:
        model = AuditEntry
        fields = ("id", "at", "actor_kind", "actor_label", "address", "action", "target_type")

    def to_representation(self, instance: AuditEntry) -> dict[str, Any]:
        """The entry in the format of exported files."""
        return as_record(instance)
