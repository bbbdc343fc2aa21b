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
        "QUIRE_DATA_DIR": "Where an instance keeps its files.",
        "DATABASE_URL": "PostgreSQL's address; without one it's SQLite in the data dir.",
        "REDIS_URL": "Redis's address; without one `up` runs a Redis of its own.",
        "QUIRE_KEY_PREFIX": "Of every key in Redis: keeps instances on one server apart.",
        "QUIRE_FILES_DIR": "Tenants' files; the same for all gateways and workers.",
        "QUIRE_ADAPTER_STORE": "LoRA adapters by digest; the same for all processes.",
        "QUIRE_ADAPTER_DIRS": "Folders that operators may load adapters from.",
        "QUIRE_PLUGINS": "Plug-ins of installed packages that are wanted; unset: all.",
        "QUIRE_LORA_RESOLVER_CACHE_DIR": "Adapters that a request's model name finds by itself.",
        "QUIRE_LORA_RESOLVER_HF_REPO_LIST": "Repositories whose adapters requests find by name.",
        "QUIRE_STATIC_ROOT": "For `collectstatic`, should a proxy serve static files.",
    },
    "The web": {
        "QUIRE_ALLOWED_HOSTS": "Names that pages answer to.",
        "QUIRE_TRUSTED_ORIGINS": "Origins that may post forms, where a proxy changes the host.",
        "QUIRE_ROOT_PATH": "Path below which a proxy serves Quire, such as /quire.",
        "QUIRE_TLS": "off; proxy: one speaks TLS before Quire; direct: Quire does.",
        "QUIRE_HSTS_SECONDS": "How long browsers insist on TLS.",
        "QUIRE_HSTS_SUBDOMAINS": "The same for names below.",
        "QUIRE_SESSION_COOKIE": "The session cookie's name.",
        "QUIRE_CSRF_COOKIE": "The name of the cookie against forged forms.",
        "QUIRE_MAX_BODY_BYTES": "Of a request.",
        "QUIRE_CORS_ORIGINS": "Sites whose pages may call the API; *: all.",
        "QUIRE_CORS_METHODS": "What these pages may do.",
        "QUIRE_CORS_HEADERS": "Headers that they may send.",
        "QUIRE_CORS_CREDENTIALS": "Whether they may send credentials.",
    },
    "People and keys": {
        "QUIRE_SECRET_KEY": "Signs sessions; the same in all gateways.",
        "QUIRE_SECRET_KEY_FALLBACKS": "Former ones, while it's being replaced.",
        "QUIRE_API_KEYS": "Keys of the operator's own that work from the start.",
        "QUIRE_LOGIN_ATTEMPTS": "Wrong passwords for a name before a pause of five minutes.",
        "QUIRE_MFA_ROLES": "Roles that need a second factor.",
        "QUIRE_OIDC_ISSUER": "The OpenID Connect provider to log in with.",
        "QUIRE_OIDC_CLIENT_ID": "What it knows this installation as.",
        "QUIRE_OIDC_CLIENT_SECRET": "What it knows this installation by.",
        "QUIRE_OIDC_NAME": "What the login page calls it.",
        "QUIRE_OIDC_SCOPES": "Scopes beside openid, profile and email.",
        "QUIRE_OIDC_GROUPS_CLAIM": "Which claim names groups.",
        "QUIRE_OIDC_ROLES": "What they are worth: group=tenant:role or group=operator.",
    },
    "Limits and money": {
        "QUIRE_REQUESTS_PER_MINUTE": "For tenants without a limit of their own; 0: none.",
        "QUIRE_TOKENS_PER_MINUTE": "For tenants without a limit of their own; 0: none.",
        "QUIRE_CURRENCY": "What prices and costs are in.",
        "QUIRE_USAGE_SPOOL_MAX": "Usage records that wait while the database is away.",
        "QUIRE_MAX_FILE_BYTES": "Of one file.",
        "QUIRE_TENANT_FILE_BYTES": "Of all of a tenant's files; 0: no limit.",
        "QUIRE_MAX_ADAPTER_BYTES": "Of one adapter.",
        "QUIRE_TENANT_ADAPTER_BYTES": "Of all of a tenant's adapters; 0: no limit.",
        "QUIRE_TENANT_IDEMPOTENCY_BYTES": "Answers kept for one tenant's idempotency keys.",
        "QUIRE_TENANT_STORED_CHARS": "A tenant's stored answers, in characters; 0: no limit.",
        "QUIRE_AUDIT_DAYS": "That the audit log keeps a row that isn't routine; 0: for ever.",
        "QUIRE_RESPONSE_DAYS": "That a response is kept; 0: for ever.",
        "QUIRE_EGRESS_NETWORKS": "Private networks that webhooks may reach all the same.",
    },
    "Answers": {
        "QUIRE_STRICT": "Refuse unknown request fields.",
        "QUIRE_REQUEST_CHAT_TEMPLATES": "Let clients send chat templates.",
        "QUIRE_CHAT_TEMPLATE_CONTENT_FORMAT": "How templates get content: auto, string, openai.",
        "QUIRE_RESPONSE_ROLE": "Role of answers to chats.",
        "QUIRE_DEFAULT_CHAT_TEMPLATE_KWARGS": "Variables of chat templates, as JSON.",
        "QUIRE_RETURN_TOKENS_AS_TOKEN_IDS": "Name tokens of log probabilities by id.",
        "QUIRE_FORCE_INCLUDE_USAGE": "End all streams with their usage.",
        "QUIRE_PER_REQUEST_METRICS": "Have answers tell how long they took.",
    },
    "Work behind the scenes": {
        "QUIRE_TENANT_RUNNING_BATCHES": "Of one tenant that workers run at a time.",
        "QUIRE_TENANT_RUNNING_RESPONSES": "Of one tenant that workers run at a time.",
        "QUIRE_TENANT_OPEN_BATCHES": "Of one tenant that run or wait; 0: no limit.",
        "QUIRE_TENANT_OPEN_RESPONSES": "Of one tenant that run or wait; 0: no limit.",
        "QUIRE_BATCH_CONCURRENCY": "Requests of a batch that run at a time.",
        "QUIRE_LEASE_SECONDS": "Until a silent worker's work is another's.",
        "QUIRE_SWEEP_SECONDS": "How often that is looked for.",
        "QUIRE_DRAIN_SECONDS": "Patience with open streams.",
        "QUIRE_ENGINE_COMMAND": "Starts a replica; without one `python -m engine.serving`.",
    },
    "Looking in": {
        "QUIRE_METRICS_TOKEN": "May read /metrics and all of /health.",
        "QUIRE_METRICS_ADDRESSES": "Networks that may, without a key.",
        "QUIRE_METRICS_TENANTS": "Tenants that /metrics tells apart.",
        "QUIRE_OTLP_TRACES_ENDPOINT": "Where spans are sent.",
        "QUIRE_LOG_LEVEL": "What is logged.",
        "QUIRE_LOG_STYLE": "line, json or debug.",
        "QUIRE_LOGGING_CONFIG": "A JSON file for logging in place of these two.",
        "QUIRE_DEBUG": "Django's debug mode.",
    },
    "Mail": {
        "QUIRE_SMTP_URL": "The server that mail is sent by; without one no mail is.",
        "QUIRE_MAIL_FROM": "Its sender.",
    },
    "The command line": {
        "QUIRE_URL": "Whom `manage.py chat` asks.",
        "QUIRE_API_KEY": "With which key.",
    },
}
