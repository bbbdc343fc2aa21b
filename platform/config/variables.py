"""Environment variables that this installation reads: in groups, with what each one means.

How one is read, and its default, is where it's read (`config.environment` remembers both).
"""

from __future__ import annotations

#: Never shown, only whether they are set.
SECRETS = frozenset(
    {
        *("QUIRE_SECRET_KEY", "QUIRE_SECRET_KEY_FALLBACKS", "QUIRE_API_KEYS", "QUIRE_API_KEY"),
        *("QUIRE_METRICS_TOKEN", "QUIRE_OIDC_CLIENT_SECRET"),
    }
)
#: Addresses, which may hold a password: shown without it.
ADDRESSES = frozenset(
    {
        *("DATABASE_URL", "REDIS_URL", "QUIRE_SMTP_URL", "QUIRE_OTLP_TRACES_ENDPOINT"),
        *("QUIRE_OIDC_ISSUER", "QUIRE_URL"),
    }
)

GROUPS: dict[str, dict[str, str]] = {
    "Where things are": {
        "QUIRE_DATA_DIR": "Directory for the files of an instance.",
        "DATABASE_URL": "PostgreSQL URL. Default: SQLite in the data directory.",
        "REDIS_URL": "Redis URL. Without it, `up` starts an embedded Redis.",
        "QUIRE_KEY_PREFIX": (
            "Prefix of every Redis key. Lets several instances share one Redis server."
        ),
        "QUIRE_FILES_DIR": (
            "Directory for tenants' files. Must be shared by all gateways and workers."
        ),
        "QUIRE_ADAPTER_STORE": (
            "Directory of LoRA adapters. Must be shared by gateways, workers and replicas."
        ),
        "QUIRE_ADAPTER_DIRS": "Directories that operators may load adapters from.",
        "QUIRE_PLUGINS": "Comma-separated plug-ins to load from installed packages. Default: all.",
        "QUIRE_LORA_RESOLVER_CACHE_DIR": (
            "Directory of LoRA adapters that are loaded when a request names them."
        ),
        "QUIRE_LORA_RESOLVER_HF_REPO_LIST": (
            "Hub repositories of LoRA adapters that are loaded when a request names them."
        ),
        "QUIRE_STATIC_ROOT": "Target directory of `collectstatic`, if a proxy serves static files.",
    },
    "The web": {
        "QUIRE_ALLOWED_HOSTS": "Comma-separated host names that the web interface answers to.",
        "QUIRE_TRUSTED_ORIGINS": (
            "Origins allowed to submit forms, if a proxy changes the host name."
        ),
        "QUIRE_ROOT_PATH": "Path below which a proxy serves Quire, such as /quire.",
        "QUIRE_TLS": (
            'Where TLS ends: "off", "proxy" (a proxy terminates it) or "direct" (Quire does).'
        ),
        "QUIRE_HSTS_SECONDS": "HSTS max-age, in seconds.",
        "QUIRE_HSTS_SUBDOMAINS": "Add includeSubDomains to the HSTS header.",
        "QUIRE_SESSION_COOKIE": "Name of the session cookie.",
        "QUIRE_CSRF_COOKIE": "Name of the CSRF cookie.",
        "QUIRE_MAX_BODY_BYTES": "Largest accepted request body, in bytes.",
        "QUIRE_CORS_ORIGINS": (
            'Comma-separated origins allowed to call the API from a browser. "*" allows all.'
        ),
        "QUIRE_CORS_METHODS": "HTTP methods allowed in cross-origin requests.",
        "QUIRE_CORS_HEADERS": "Request headers allowed in cross-origin requests.",
        "QUIRE_CORS_CREDENTIALS": "Allow credentials in cross-origin requests.",
    },
    "People and keys": {
        "QUIRE_SECRET_KEY": (
            "Django's secret key: signs sessions and encrypts second factors. Must be equal on "
            "all gateways and workers."
        ),
        "QUIRE_SECRET_KEY_FALLBACKS": "Old secret keys that are still accepted during a rotation.",
        "QUIRE_API_KEYS": "API keys to create at the first start, comma-separated.",
        "QUIRE_LOGIN_ATTEMPTS": "Failed logins per username before a five-minute lockout.",
        "QUIRE_MFA_ROLES": "Comma-separated roles that must use a second factor.",
        "QUIRE_OIDC_ISSUER": "The OpenID Connect provider to log in with.",
        "QUIRE_OIDC_CLIENT_ID": "OAuth client ID at the identity provider.",
        "QUIRE_OIDC_CLIENT_SECRET": "OAuth client secret at the identity provider.",
        "QUIRE_OIDC_NAME": "Provider name on the login page.",
        "QUIRE_OIDC_SCOPES": "OAuth scopes to request in addition to openid, profile and email.",
        "QUIRE_OIDC_GROUPS_CLAIM": "Claim that lists a user's groups.",
        "QUIRE_OIDC_ROLES": 'Group-to-role mapping, such as "ml=acme:member,ops=operator".',
    },
    "Limits and money": {
        "QUIRE_REQUESTS_PER_MINUTE": "Default request limit per tenant and minute (0 = unlimited).",
        "QUIRE_TOKENS_PER_MINUTE": "Default token limit per tenant and minute (0 = unlimited).",
        "QUIRE_CURRENCY": "Currency of prices and costs (ISO 4217 code).",
        "QUIRE_USAGE_SPOOL_MAX": (
            "Maximum usage records buffered in Redis while the database is unreachable."
        ),
        "QUIRE_MAX_FILE_BYTES": "Largest accepted file, in bytes.",
        "QUIRE_TENANT_FILE_BYTES": "File storage per tenant, in bytes (0 = unlimited).",
        "QUIRE_MAX_ADAPTER_BYTES": "Largest accepted LoRA adapter, in bytes.",
        "QUIRE_TENANT_ADAPTER_BYTES": "Adapter storage per tenant, in bytes (0 = unlimited).",
        "QUIRE_TENANT_IDEMPOTENCY_BYTES": (
            "Redis memory per tenant for stored idempotent responses, in bytes."
        ),
        "QUIRE_TENANT_STORED_CHARS": "Stored responses per tenant, in characters (0 = unlimited).",
        "QUIRE_AUDIT_DAYS": "That the audit log keeps a row that isn't routine; 0: for ever.",
        "QUIRE_RESPONSE_DAYS": "Days to keep stored responses (0 = forever).",
        "QUIRE_EGRESS_NETWORKS": "Private networks (CIDR) that webhooks may call.",
    },
    "Answers": {
        "QUIRE_STRICT": (
            "Reject requests with unknown fields (default: ignore them and name them in a header)."
        ),
        "QUIRE_REQUEST_CHAT_TEMPLATES": "Allow requests to contain a chat template.",
        "QUIRE_CHAT_TEMPLATE_CONTENT_FORMAT": (
            'Message content passed to chat templates: "auto", "string" or "openai" (list of '
            "parts)."
        ),
        "QUIRE_RESPONSE_ROLE": "Role of generated chat messages.",
        "QUIRE_DEFAULT_CHAT_TEMPLATE_KWARGS": "Default variables for chat templates, as JSON.",
        "QUIRE_RETURN_TOKENS_AS_TOKEN_IDS": 'Return tokens in logprobs as "token_id:N".',
        "QUIRE_FORCE_INCLUDE_USAGE": "Send a usage chunk at the end of every stream.",
        "QUIRE_PER_REQUEST_METRICS": "Add timing metrics to every response.",
    },
    "Work behind the scenes": {
        "QUIRE_TENANT_RUNNING_BATCHES": "Maximum batches of one tenant that run at once.",
        "QUIRE_TENANT_RUNNING_RESPONSES": (
            "Maximum background responses of one tenant that run at once."
        ),
        "QUIRE_TENANT_OPEN_BATCHES": "Maximum unfinished batches per tenant (0 = unlimited).",
        "QUIRE_TENANT_OPEN_RESPONSES": (
            "Maximum unfinished background responses per tenant (0 = unlimited)."
        ),
        "QUIRE_BATCH_CONCURRENCY": "Maximum concurrent requests of one batch.",
        "QUIRE_LEASE_SECONDS": (
            "Seconds without a heartbeat after which another worker takes over a job."
        ),
        "QUIRE_SWEEP_SECONDS": "Interval of the check for abandoned jobs, in seconds.",
        "QUIRE_DRAIN_SECONDS": "Seconds that open streams get to finish on shutdown.",
        "QUIRE_ENGINE_COMMAND": (
            "Command that starts a replica (default: `python -m engine.serving`)."
        ),
    },
    "Looking in": {
        "QUIRE_METRICS_TOKEN": (
            "Bearer token that grants access to /metrics and the details of /health."
        ),
        "QUIRE_METRICS_ADDRESSES": (
            "Networks allowed to read /metrics and the details of /health without a key."
        ),
        "QUIRE_METRICS_TENANTS": (
            'Maximum tenants with their own label in /metrics; the rest are "other".'
        ),
        "QUIRE_OTLP_TRACES_ENDPOINT": "OTLP endpoint that receives trace spans.",
        "QUIRE_LOG_LEVEL": "Minimum level of log messages.",
        "QUIRE_LOG_STYLE": 'Log format: "line", "json" or "debug".',
        "QUIRE_LOGGING_CONFIG": (
            "JSON file with a `logging.config` dictionary; overrides level and style."
        ),
        "QUIRE_DEBUG": "Django's debug mode.",
    },
    "Mail": {
        "QUIRE_SMTP_URL": "SMTP server for outgoing mail. Without it, no mail is sent.",
        "QUIRE_MAIL_FROM": "Sender address of outgoing mail.",
    },
    "The command line": {
        "QUIRE_URL": "Server URL for `manage.py chat`.",
        "QUIRE_API_KEY": "API key for `manage.py chat`.",
    },
}
