"""Bodies of the management API from which commands take their options."""

from __future__ import annotations

from rest_framework import serializers

from tenants import api_keys

_DEFAULT = " (default: the tenant's limit)"


class ApiKeyCreateSerializer(serializers.Serializer):
    """A new key: its scopes, limits and expiry."""

    name = serializers.CharField(
        max_length=100,
        required=False,
        allow_blank=True,
        default="",
        help_text="purpose of the key",
    )
    scopes = serializers.ListField(
        child=serializers.ChoiceField(sorted(api_keys.ALL)),
        required=False,
        default=api_keys.default_scopes,
        help_text=f"of {', '.join(sorted(api_keys.ALL))} "
        f"(default: {','.join(sorted(api_keys.DEFAULT))})",
    )
    expires_at = serializers.DateTimeField(
        required=False, allow_null=True, default=None, help_text="end of validity (default: never)"
    )
    service_account = serializers.IntegerField(
        required=False,
        allow_null=True,
        default=None,
        help_text="id of the service account that holds the key (default: the tenant itself)",
    )
    requests_per_minute = serializers.IntegerField(
        required=False, min_value=0, help_text=f"requests per minute of this key{_DEFAULT}"
    )
    tokens_per_minute = serializers.IntegerField(
        required=False, min_value=0, help_text=f"tokens per minute, prompt plus output{_DEFAULT}"
    )
    media_per_minute = serializers.IntegerField(
        required=False,
        min_value=0,
        help_text=f"images, videos, documents and audio files per minute{_DEFAULT}",
    )
    media_bytes_per_minute = serializers.IntegerField(
        required=False, min_value=0, help_text=f"bytes of such files per minute{_DEFAULT}"
    )
    media_seconds_per_minute = serializers.IntegerField(
        required=False,
        min_value=0,
        help_text=f"seconds of decoding such files per minute{_DEFAULT}",
    )
    max_running_requests = serializers.IntegerField(
        required=False, min_value=1, help_text=f"maximum concurrent requests of this key{_DEFAULT}"
    )
    max_context_tokens = serializers.IntegerField(
        required=False,
        min_value=1,
        help_text=f"maximum tokens of a request, prompt plus output{_DEFAULT}",
    )
    allowed_models = serializers.ListField(
        child=serializers.CharField(),
        required=False,
        help_text="models that the key may use (default: all of the tenant's)",
    )
    endpoints = serializers.ListField(
        child=serializers.CharField(),
        required=False,
        help_text="paths that the key may call, such as /v1/embeddings (default: all)",
    )
    addresses = serializers.ListField(
        child=serializers.CharField(),
        required=False,
        help_text="addresses that the key may be used from, such as 10.0.0.0/8 (default: any)",
    )
