"""An installation's settings, each declared once and read from the environment.

`settings.QUIRE` is a `QuireSettings`. Engine processes read their few variables themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    SecretStr,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from common.installation import BASE_DIR, DEFAULT_DATA_DIR, PROGRAM
from common.setting_types import (
    GIB,
    MIB,
    Address,
    Bytes,
    Directories,
    Directory,
    GroupRoles,
    JsonObject,
    Networks,
    Roles,
    Secrets,
    TenantQuotas,
    Words,
    check_currency,
    check_database_url,
    check_issuer,
    check_object_storage,
    check_redis_url,
    check_root_path,
    check_smtp_url,
    check_traces_endpoint,
    split_pairs,
)


def _group(name: str) -> Callable[..., Any]:
    """`Field` for a setting of this group."""
    return partial(Field, json_schema_extra={"group": name})


_storage = _group("Storage and services")
_http = _group("HTTP")
_users = _group("Users and keys")
_limits = _group("Limits and billing")
_responses = _group("Responses")
_workers = _group("Workers and replicas")
_monitoring = _group("Monitoring and logs")
_mail = _group("Mail")
_client = _group("Command line")
#: Fields without a variable: a settings module, a test or the command that starts a process sets
#: them.
WITHOUT_VARIABLE = "Fields without a variable"
_internal = _group(WITHOUT_VARIABLE)


class _Variables(EnvSettingsSource):
    """The environment. An empty or blank variable counts as unset."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        if group_of(field) == WITHOUT_VARIABLE:
            return None, field_name, False
        value, key, is_complex = super().get_field_value(field, field_name)
        return (value or "").strip() or None, key, is_complex


class QuireSettings(BaseSettings):
    """Settings of gateways, workers and commands. Raises pydantic's `ValidationError`."""

    model_config = SettingsConfigDict(
        env_prefix="QUIRE_",
        enable_decoding=False,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        validate_by_name=True,
    )

    data_dir: Directory = _storage(
        DEFAULT_DATA_DIR, description="Directory for the files of an instance."
    )
    database_url: Annotated[Address, AfterValidator(check_database_url)] = _storage(
        "",
        validation_alias="DATABASE_URL",
        description="PostgreSQL URL. `?pool_size=N` is the maximum number of connections per "
        "process (default: 20). Default: SQLite in the data directory.",
    )
    redis_url: Annotated[Address, AfterValidator(check_redis_url)] = _storage(
        "",
        validation_alias="REDIS_URL",
        description="Redis URL. Without it, `up` starts an embedded Redis.",
    )
    key_prefix: str = _storage(
        "quire",
        description="Prefix of every Redis key. Lets several instances share one Redis server.",
    )
    storage_dir: Directory = _storage(
        default_factory=lambda data: data["data_dir"],
        description="Directory of tenants' files (`files/`) and LoRA adapters (`adapters/`). Must "
        "be shared by all gateways, workers and replicas. Default: the data directory.",
    )
    object_storage: Annotated[SecretStr, AfterValidator(check_object_storage)] = _storage(
        SecretStr(""),
        description="Object storage of tenants' files and LoRA adapters: an entry of Django's "
        'STORAGES as JSON, such as `{"BACKEND": "storages.backends.s3.S3Storage", "OPTIONS": '
        '{"bucket_name": "quire"}}`. Default: the storage directory.',
    )
    object_cache_bytes: Bytes = _storage(
        10 * GIB,
        description="Maximum size of the copies of files, and of those of adapters, that a machine "
        "keeps in its data directory.",
    )
    presigned_downloads: bool = _storage(
        False,
        description="Redirect downloads of files to the object storage (S3, Google Cloud, Azure). "
        "Clients must be able to reach it.",
    )
    adapter_dirs: Directories = _storage(
        default_factory=lambda data: (data["data_dir"], BASE_DIR / "demo" / "adapters"),
        description="Directories that operators may load adapters from.",
    )
    plugins: Words | None = _storage(
        None, description="Comma-separated plug-ins to load from installed packages. Default: all."
    )
    lora_resolver_cache_dir: Directory | None = _storage(
        None,
        description="Directory of LoRA adapters that are loaded when a request names them.",
    )
    lora_resolver_hf_repo_list: Words = _storage(
        (),
        description="Hub repositories of LoRA adapters that are loaded when a request names them.",
    )

    allowed_hosts: Words = _http(
        ("localhost", "127.0.0.1", "[::1]"),
        description="Comma-separated host names that the web interface answers to.",
    )
    trusted_origins: Words = _http(
        (), description="Origins allowed to submit forms, if a proxy changes the host name."
    )
    root_path: Annotated[str, AfterValidator(check_root_path)] = _http(
        "", description="Path below which a proxy serves Quire, such as /quire."
    )
    tls: Literal["off", "proxy", "direct"] = _http(
        "off",
        description='Where TLS ends: "off", "proxy" (a proxy terminates it) or "direct" (Quire '
        "does).",
    )
    max_body_bytes: Bytes = _http(10 * MIB, description="Largest accepted request body, in bytes.")
    cors_origins: Words = _http(
        (),
        description='Comma-separated origins allowed to call the API from a browser. "*" allows '
        "all.",
    )

    secret_key: SecretStr = _users(
        SecretStr(""),
        description="Django's secret key: signs sessions and encrypts second factors. Must be "
        "equal on all gateways and workers.",
    )
    secret_key_fallbacks: Secrets = _users(
        (), description="Old secret keys that are still accepted during a rotation."
    )
    api_keys: Secrets = _users(
        (), description="API keys to create at the first start, comma-separated."
    )
    mfa_roles: Roles = _users(
        (), description="Comma-separated roles that must use a second factor."
    )
    oidc_issuer: Annotated[Address, AfterValidator(check_issuer)] = _users(
        "", description="The OpenID Connect provider to log in with."
    )
    oidc_client_id: str = _users("", description="OAuth client ID at the identity provider.")
    oidc_client_secret: SecretStr = _users(
        SecretStr(""), description="OAuth client secret at the identity provider."
    )
    oidc_name: str = _users("single sign-on", description="Provider name on the login page.")
    oidc_scopes: Words = _users(
        (), description="OAuth scopes to request in addition to openid, profile and email."
    )
    oidc_groups_claim: str = _users("groups", description="Claim that lists a user's groups.")
    oidc_roles: GroupRoles = _users(
        {}, description='Group-to-role mapping, such as "ml=acme:member,ops=operator".'
    )

    currency: Annotated[str, AfterValidator(check_currency)] = _limits(
        "usd", description="Currency of prices and costs (ISO 4217 code)."
    )
    max_file_bytes: Bytes = _limits(200 * MIB, description="Largest accepted file, in bytes.")
    max_adapter_bytes: Bytes = _limits(
        2 * GIB, description="Largest accepted LoRA adapter, in bytes."
    )
    tenant_quotas: Annotated[TenantQuotas, BeforeValidator(split_pairs)] = _limits(
        TenantQuotas(),
        description="Default quotas of tenants (0 = unlimited), such as "
        '"requests_per_minute=600,file_bytes=10GiB": `requests_per_minute` and '
        "`tokens_per_minute` of tenants without their own; `running_batches` and "
        "`running_responses` (background) at a time, at least 1; `open_batches` and "
        "`open_responses`, running and waiting; `stored_chars` of stored responses; `file_bytes`; "
        "`adapter_bytes`; "
        "`idempotency_bytes` of answers kept for idempotency keys, at least 1.",
    )
    audit_days: int = _limits(
        730,
        ge=0,
        le=36_500,
        description="Days to keep audit rows that aren't routine (0 = forever).",
    )
    response_days: int = _limits(
        30, ge=0, le=36_500, description="Days to keep stored responses (0 = forever)."
    )
    egress_networks: Networks = _limits(
        (), description="Private networks (CIDR) that webhooks may call."
    )
    allowed_media_domains: Words = _limits(
        (), description="The only hosts that images are fetched from. Default: all public ones."
    )
    media_fetch_timeout_s: float = _limits(
        10.0, gt=0, le=600, description="Seconds within which media must be fetched."
    )
    media_fetch_threads: int = _limits(
        8, ge=1, le=256, description="Media that a gateway process fetches at a time."
    )
    media_cache_bytes: Annotated[ByteSize, AfterValidator(int)] = _limits(
        128 * MIB,
        ge=0,
        description="Decoded media that a gateway process keeps (0 = none).",
    )
    allowed_local_media_path: Directory | None = _limits(
        None, description="Directory whose images requests may name by `file:` addresses."
    )

    strict: bool = _responses(
        False,
        description="Reject requests with unknown fields (default: ignore them and name them in a "
        "header).",
    )
    request_chat_templates: bool = _responses(
        False, description="Allow requests to contain a chat template."
    )
    default_chat_template_kwargs: JsonObject = _responses(
        {}, description="Default variables for chat templates, as JSON."
    )
    chat_template_content_format: Literal["auto", "string", "openai"] = _responses(
        "auto",
        description='Message content passed to chat templates: "auto", "string" or "openai" (list '
        "of parts).",
    )

    batch_concurrency: int = _workers(
        8, ge=1, le=1024, description="Maximum concurrent requests of one batch."
    )
    drain_seconds: int = _workers(
        30, ge=0, description="Seconds that open streams get to finish on shutdown."
    )
    shutdown_delay_seconds: int = _workers(
        5,
        ge=0,
        description="Seconds from SIGTERM, when `/ready` of `manage.py gateway` turns red, until "
        "it accepts no more connections. A load balancer must notice within it.",
    )

    metrics_token: SecretStr = _monitoring(
        SecretStr(""),
        description="Bearer token that grants access to /metrics and the details of /health.",
    )
    metrics_addresses: Networks = _monitoring(
        (),
        description="Networks allowed to read /metrics and the details of /health without a key.",
    )
    otlp_traces_endpoint: Annotated[Address, AfterValidator(check_traces_endpoint)] = _monitoring(
        "", description="OTLP endpoint that receives trace spans."
    )
    debug: bool = _monitoring(False, description="Django's debug mode.")
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"],
        BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value),
    ] = _monitoring("INFO", description="Minimum level of log messages.")
    log_style: Literal["line", "json", "debug"] = _monitoring(
        default_factory=lambda data: "debug" if data.get("debug") else "line",
        description='Log format: "line", "json" or "debug".',
    )

    smtp_url: Annotated[Address, AfterValidator(check_smtp_url)] = _mail(
        "", description="SMTP server for outgoing mail. Without it, no mail is sent."
    )
    mail_from: str = _mail("", description="Sender address of outgoing mail.")

    api_key: SecretStr = _client(
        SecretStr(""), description=f"API key for `{PROGRAM} chat`, `run_batch` and `bench`."
    )

    cors_methods: Words = _internal(
        ("*",), description="HTTP methods allowed in cross-origin requests."
    )
    cors_headers: Words = _internal(
        ("*",), description="Request headers allowed in cross-origin requests."
    )
    cors_credentials: bool = _internal(
        False, description="Whether cross-origin requests may carry credentials."
    )
    response_role: str = _internal("assistant", description="Role of generated chat messages.")
    return_tokens_as_token_ids: bool = _internal(
        False, description='Return tokens in logprobs as "token_id:N".'
    )
    force_include_usage: bool = _internal(
        False, description="Send a usage chunk at the end of every stream."
    )
    per_request_metrics: bool = _internal(
        False, description="Add timing metrics to every response."
    )
    tool_parsers: dict[str, str] = _internal(
        {}, description="Tool call parsers by name, as dotted paths of classes."
    )
    reasoning_parsers: dict[str, str] = _internal(
        {}, description="Reasoning parsers by name, as dotted paths of classes."
    )
    engine_command: tuple[str, ...] = _internal(
        (), description="Command that starts a replica. Empty: `python -m engine.serving`."
    )
    adapter_check_command: tuple[str, ...] = _internal(
        (), description="Command that checks an adapter. Empty: `python -m engine.lora.check`."
    )
    celery_app: str = _internal(
        "config.celery.app", description="Dotted path of the application that takes tasks."
    )
    demo_model: Path = _internal(
        BASE_DIR / "demo" / "model", description="Directory of the model that `up` serves first."
    )
    demo_adapters: Path = _internal(
        BASE_DIR / "demo" / "adapters", description="Directory of the adapters of that model."
    )
    demo_vision_model: Path = _internal(
        BASE_DIR / "demo" / "vision" / "model",
        description="Directory of the model that takes pictures and that `up` serves second.",
    )
    lease_seconds: float = _internal(
        30.0,
        gt=0,
        description="Seconds without a heartbeat after which another worker takes over a job.",
    )
    sweep_seconds: float = _internal(
        10.0, gt=0, description="Interval of the check for abandoned jobs, in seconds."
    )
    max_batch_requests: int = _internal(
        50_000, ge=1, description="Maximum number of lines in a batch's file."
    )
    max_prompts: int = _internal(
        2048, ge=1, description="Maximum number of prompts in one request."
    )
    max_pooling_tokens: int = _internal(
        300_000,
        ge=1,
        description="Maximum number of tokens of all texts in one pooling request.",
    )
    failover_wait_s: float = _internal(
        30.0, ge=0, description="Time that a request waits for a replica to start or return."
    )
    max_attempts: int = _internal(
        5,
        ge=1,
        description="Replicas in a row that may die while they run a request, before it is taken "
        "for the cause.",
    )
    stream_start_wait_s: float = _internal(
        10.0,
        ge=0,
        description="Time without a token after which a stream sends its headers. Until then an "
        "error is an HTTP status.",
    )
    sse_heartbeat_s: float = _internal(
        15.0, ge=0, description="Time without a token after which a comment is sent; 0: never."
    )
    render_timeout_s: float = _internal(
        20.0, gt=0, description="Time for one prompt's template and tokenization."
    )
    inline_render_chars: int = _internal(
        4096, ge=0, description="Maximum length of prompts that are rendered on the event loop."
    )
    affinity_slack: int = _internal(
        8,
        ge=0,
        description="Number of requests that a replica may be ahead of the least loaded one and "
        "still be chosen for the prefixes it has cached.",
    )
    default_model: str = _internal(
        "", description="Model that requests without `model` go to: the one that `up` started with."
    )
    without_worker: bool = _internal(
        False, description="Whether `up` started no worker (`--no-worker`)."
    )
    local_replica_id: str = _internal(
        "", description="Replica in this gateway's pod, by `gateway --replica-id`; it comes first."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, _Variables(settings_cls)

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        """Check settings that depend on each other."""
        if self.smtp_url and not self.mail_from:
            raise ValueError("QUIRE_MAIL_FROM must be set where QUIRE_SMTP_URL is")
        storage = self.object_storage.get_secret_value()
        clouds = ("S3", "GoogleCloud", "Azure")
        if self.presigned_downloads and not any(cloud in storage for cloud in clouds):
            raise ValueError(
                "QUIRE_PRESIGNED_DOWNLOADS needs S3, Google Cloud or Azure as QUIRE_OBJECT_STORAGE"
            )
        client = self.oidc_client_id and self.oidc_client_secret.get_secret_value()
        if self.oidc_issuer and not client:
            raise ValueError(
                "QUIRE_OIDC_ISSUER needs QUIRE_OIDC_CLIENT_ID and QUIRE_OIDC_CLIENT_SECRET too"
            )
        return self

    @property
    def storages(self) -> dict[str, Any]:
        """Django's STORAGES entry for the object storage."""
        text = self.object_storage.get_secret_value()
        return {"objects": json.loads(text)} if text else {}

    @property
    def files_dir(self) -> Path:
        """Directory of tenants' files; with an object storage, of cached copies."""
        if self.storages:
            return self.data_dir / "file-cache"
        return self.storage_dir / "files"

    @property
    def adapters_dir(self) -> Path:
        """Directory of LoRA adapters; with an object storage, of cached copies."""
        if self.storages:
            return self.data_dir / "adapter-cache"
        return self.storage_dir / "adapters"

    def replace(self, **changes: Any) -> QuireSettings:
        """A copy with these fields changed. Raises `ValidationError`."""
        return QuireSettings(**(dict(self) | changes))


def group_of(field: FieldInfo) -> str:
    """The group that a setting belongs to."""
    extra = field.json_schema_extra
    assert isinstance(extra, dict)  # noqa: S101 - every field above is made by `_group`
    return str(extra["group"])


def variable_of(name: str) -> str:
    """The variable that sets the field `name`."""
    return str(QuireSettings.model_fields[name].validation_alias or f"QUIRE_{name.upper()}")


def is_secret(field: FieldInfo) -> bool:
    """Whether a setting's value is never displayed, only whether it is set."""
    return field.annotation in (SecretStr, tuple[SecretStr, ...])
