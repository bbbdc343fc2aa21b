"""Settings. Nothing needs to be set for the embedded default; `docs/settings.md` lists them.

Embedded: SQLite and an embedded Redis in the data dir. Production: `DATABASE_URL`, `REDIS_URL`.
"""

import sys
from pathlib import Path
from typing import Any

from accounts.mail import mail_settings
from accounts.settings import identity_settings
from common import settings as env
from common.files import make_private, secret_key
from config import queues
from config.connections import celery_url, checked_url, database, socket_url
from config.logging import build_logging
from engine.system.light_imports import import_redis

import_redis()

#: The folder of the apps: `platform/` of a checkout, `quire/_platform/` of an installed package.
APPS_DIR = Path(__file__).resolve().parent.parent
BASE_DIR = APPS_DIR.parent
IS_INSTALLED = APPS_DIR.name == "_platform"
DEFAULT_DATA_DIR = (Path.home() if IS_INSTALLED else BASE_DIR) / ".quire"
DATA_DIR = env.folder("QUIRE_DATA_DIR", DEFAULT_DATA_DIR)
DEBUG = env.flag("QUIRE_DEBUG")
DEFAULT_EXCEPTION_REPORTER_FILTER = "config.debug_report.WithoutAddresses"

SECRET_KEY = env.secret("QUIRE_SECRET_KEY") or secret_key(DATA_DIR)
SECRET_KEY_FALLBACKS = env.words("QUIRE_SECRET_KEY_FALLBACKS", [])
ALLOWED_HOSTS = env.words("QUIRE_ALLOWED_HOSTS", ["localhost", "127.0.0.1", "[::1]"])
CSRF_TRUSTED_ORIGINS = env.words("QUIRE_TRUSTED_ORIGINS", [])
# Where below its host a proxy serves Quire, such as "/quire"; --root-path sets it.
FORCE_SCRIPT_NAME = env.root_path("QUIRE_ROOT_PATH")

DATABASE_URL = env.text("DATABASE_URL", "")
if not DATABASE_URL:
    make_private(DATA_DIR)
DATABASES = {"default": database(DATABASE_URL, DATA_DIR)}
REDIS_URL = checked_url(env.text("REDIS_URL", socket_url(DATA_DIR)))

#: What Quire's own apps read.
QUIRE: dict[str, Any] = {
    "DATA_DIR": DATA_DIR,
    # Every key in Redis starts with this: several instances may share a server.
    "KEY_PREFIX": env.text("QUIRE_KEY_PREFIX", "quire"),
    "MAX_BODY_BYTES": env.integer("QUIRE_MAX_BODY_BYTES", 10 * 1024 * 1024, low=1024),
    # Refuse unknown fields of a request instead of naming them in a header.
    "STRICT": env.flag("QUIRE_STRICT"),
    # Let clients send a `chat_template` of their own.
    "REQUEST_CHAT_TEMPLATES": env.flag("QUIRE_REQUEST_CHAT_TEMPLATES"),
    # How chat templates get content, see `inference.settings`.
    "CHAT_TEMPLATE_CONTENT_FORMAT": env.text("QUIRE_CHAT_TEMPLATE_CONTENT_FORMAT", "auto"),
    # The role that answers to chats have.
    "RESPONSE_ROLE": env.text("QUIRE_RESPONSE_ROLE", "assistant"),
    # Variables of chat templates, where a chat doesn't set them.
    "DEFAULT_CHAT_TEMPLATE_KWARGS": env.mapping("QUIRE_DEFAULT_CHAT_TEMPLATE_KWARGS"),
    # Log probabilities name tokens by id, where a request doesn't say.
    "RETURN_TOKENS_AS_TOKEN_IDS": env.flag("QUIRE_RETURN_TOKENS_AS_TOKEN_IDS"),
    # Streams end with their usage, whether they asked for it or not.
    "FORCE_INCLUDE_USAGE": env.flag("QUIRE_FORCE_INCLUDE_USAGE"),
    # Have answers tell how long they took.
    "PER_REQUEST_METRICS": env.flag("QUIRE_PER_REQUEST_METRICS"),
    "DEMO_MODEL": BASE_DIR / "demo" / "model",
    # The command that runs one replica, before its flags. Empty: `python -m engine.serving`.
    "ENGINE_COMMAND": env.words("QUIRE_ENGINE_COMMAND", []),
    # Seconds that a replica gets to finish its streams when it's drained.
    "DRAIN_SECONDS": env.integer("QUIRE_DRAIN_SECONDS", 30),
    # Usage records that wait in Redis while the database is away; the oldest go beyond it.
    "USAGE_SPOOL_MAX": env.integer("QUIRE_USAGE_SPOOL_MAX", 1_000_000, low=1000),
    # Where gateways find the application that hands work to workers.
    "CELERY_APP": "config.celery.app",
    # Files of tenants. Every gateway and worker must see the same folder.
    "FILES_DIR": env.folder("QUIRE_FILES_DIR", DATA_DIR / "files"),
    "MAX_FILE_BYTES": env.integer("QUIRE_MAX_FILE_BYTES", 200 * 1024 * 1024, low=1024),
    # A tenant's share of the workers, and of what may wait for them (0: no limit).
    "TENANT_RUNNING_BATCHES": env.integer("QUIRE_TENANT_RUNNING_BATCHES", 4, low=1),
    "TENANT_RUNNING_RESPONSES": env.integer("QUIRE_TENANT_RUNNING_RESPONSES", 16, low=1),
    "TENANT_OPEN_BATCHES": env.integer("QUIRE_TENANT_OPEN_BATCHES", 100),
    "TENANT_OPEN_RESPONSES": env.integer("QUIRE_TENANT_OPEN_RESPONSES", 1000),
    # All answers that a tenant has stored, in characters (0: no limit).
    "TENANT_STORED_CHARS": env.integer("QUIRE_TENANT_STORED_CHARS", 10 * 1024**3),
    # LoRA adapters. Every gateway, worker and replica must see the same folder.
    "ADAPTERS_DIR": env.folder("QUIRE_ADAPTER_STORE", DATA_DIR / "adapters"),
    # Folders of the server that operators may load adapters from.
    "ADAPTER_DIRS": env.folders("QUIRE_ADAPTER_DIRS", [DATA_DIR, BASE_DIR / "demo" / "adapters"]),
    # Where the resolver `lora_filesystem_resolver` looks adapters up by name. Empty: nowhere.
    "LORA_RESOLVER_CACHE_DIR": env.text("QUIRE_LORA_RESOLVER_CACHE_DIR", ""),
    # Repositories of the hub in which `hf_hub_resolver` looks them up. Empty: in none.
    "LORA_RESOLVER_HF_REPO_LIST": env.words("QUIRE_LORA_RESOLVER_HF_REPO_LIST", []),
    "DEMO_ADAPTERS": BASE_DIR / "demo" / "adapters",
    "MAX_ADAPTER_BYTES": env.integer("QUIRE_MAX_ADAPTER_BYTES", 2 * 1024**3, low=1024),
    # What all adapters of one tenant may take; 0 is no limit.
    "TENANT_ADAPTER_BYTES": env.integer("QUIRE_TENANT_ADAPTER_BYTES", 10 * 1024**3),
    # The program that checks one, before its flags. Empty: `python -m engine.lora.check`.
    "ADAPTER_CHECK_COMMAND": [],
    # What all files of one tenant may take; 0 is no limit.
    "TENANT_FILE_BYTES": env.integer("QUIRE_TENANT_FILE_BYTES", 10 * 1024**3),
    # What the answers kept for one tenant's idempotency keys may take in Redis.
    "TENANT_IDEMPOTENCY_BYTES": env.integer("QUIRE_TENANT_IDEMPOTENCY_BYTES", 16 * 1024**2),
    # Days that the audit log keeps what isn't routine; 0 is for ever.
    "AUDIT_DAYS": env.integer("QUIRE_AUDIT_DAYS", 730, high=36_500),
    # Days that a response is kept for `previous_response_id`; 0 is for ever.
    "RESPONSE_DAYS": env.integer("QUIRE_RESPONSE_DAYS", 30, high=36_500),
    # A worker that is silent for so long has lost its work to another.
    "LEASE_SECONDS": env.integer("QUIRE_LEASE_SECONDS", 30, low=1),
    # How often workers look for work that nobody does.
    "SWEEP_SECONDS": env.integer("QUIRE_SWEEP_SECONDS", 10, low=1),
    # Requests of one batch that a worker has running at a time.
    "BATCH_CONCURRENCY": env.integer("QUIRE_BATCH_CONCURRENCY", 8, low=1, high=1024),
    # Private networks that webhooks may reach all the same, as CIDR.
    "EGRESS_NETWORKS": env.networks("QUIRE_EGRESS_NETWORKS"),
    # What prices and costs are in, as ISO 4217 has it, in small letters.
    "CURRENCY": env.currency("QUIRE_CURRENCY", "usd"),
    # Who may read /metrics and all of /health beside operators.
    "METRICS_TOKEN": env.secret("QUIRE_METRICS_TOKEN"),
    "METRICS_ADDRESSES": env.networks("QUIRE_METRICS_ADDRESSES"),
    # Tenants that /metrics tells apart; those that come later are "other".
    "METRICS_TENANTS": env.integer("QUIRE_METRICS_TENANTS", 100),
    # Where spans of requests are sent: OTLP.
    "OTLP_TRACES_ENDPOINT": env.text("QUIRE_OTLP_TRACES_ENDPOINT", ""),
    # What a tenant without limits of its own gets; 0 is no limit.
    "DEFAULT_REQUESTS_PER_MINUTE": env.integer("QUIRE_REQUESTS_PER_MINUTE", 0),
    "DEFAULT_TOKENS_PER_MINUTE": env.integer("QUIRE_TOKENS_PER_MINUTE", 0),
}

INSTALLED_APPS = [
    # Before staticfiles: `runserver` becomes an ASGI server. Nothing else needs all of Twisted.
    *(["daphne"] if sys.argv[1:2] == ["runserver"] else []),
    "django_prometheus",
    "config.apps.QuireAdminConfig",  # django.contrib.admin
    "tenants",  # before auth, whose `changepassword` it replaces
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "servestatic.runserver_nostatic",  # one way to serve static files, with or without DEBUG
    "django.contrib.humanize",
    "django.contrib.staticfiles",
    "allauth",
    "allauth.account",
    "allauth.mfa",
    "allauth.socialaccount",
    "allauth.socialaccount.providers.openid_connect",
    "allauth.usersessions",
    "corsheaders",
    "django_filters",
    "rest_framework",
    "drf_spectacular",
    "channels",
    "config",
    "catalog",
    "metering",
    "storage",
    "adapters",
    "history",
    "inference",
    "accounts",
    "management_api",
    "kv_map",
    "console",
    # A clone has it, an image doesn't.
    *(["chaos"] if (BASE_DIR / "chaos").is_dir() else []),
]

AUTH_USER_MODEL = "tenants.User"
AUTHENTICATION_BACKENDS = [
    "django.contrib.auth.backends.ModelBackend",
    "allauth.account.auth_backends.AuthenticationBackend",
]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in (
        "UserAttributeSimilarityValidator",
        "MinimumLengthValidator",
        "CommonPasswordValidator",
        "NumericPasswordValidator",
    )
]
# Names, not paths: a proxy may serve Quire below one.
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "playground"

# For pages: the API's requests pass by them, see `inference.asgi`.
MIDDLEWARE = [
    "django_prometheus.middleware.PrometheusBeforeMiddleware",
    "corsheaders.middleware.CorsMiddleware",
    "tenants.audit.client_ip_middleware",
    "django.middleware.security.SecurityMiddleware",
    "console.csp.content_security_policy",
    "config.compression.compressed",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "allauth.account.middleware.AccountMiddleware",
    "accounts.middleware.IdentityMiddleware",
    "django_prometheus.middleware.PrometheusAfterMiddleware",
]

ROOT_URLCONF = "config.urls"
ASGI_APPLICATION = "config.asgi.application"
APPEND_SLASH = True

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "console.context_processors.mail",
                "console.context_processors.frame",
            ]
        },
    }
]

CACHES = {
    "default": {
        "BACKEND": "config.cache.CountedRedisCache",
        "LOCATION": REDIS_URL,
        "KEY_PREFIX": f"{QUIRE['KEY_PREFIX']}:cache",
        "OPTIONS": {
            "serializer": "config.cache.JsonSerializer",
            "pool_class": "engine.system.redis_client.FailoverConnectionPool",
        },
    }
}
CHANNEL_LAYERS = {
    "default": {
        "BACKEND": "channels_redis.pubsub.RedisPubSubChannelLayer",
        "CONFIG": {"hosts": [REDIS_URL], "prefix": f"{QUIRE['KEY_PREFIX']}:channels"},
    }
}

CELERY_BROKER_URL = celery_url(REDIS_URL)
CELERY_TASK_SERIALIZER = CELERY_RESULT_SERIALIZER = "json"  # never pickle
CELERY_ACCEPT_CONTENT = ["json"]
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_TRANSPORT_OPTIONS = {"global_keyprefix": f"{QUIRE['KEY_PREFIX']}:celery:"}
# READONLY, MISCONF and OOM are answers for a while: without this a worker ends at one of them.
CELERY_BROKER_CHANNEL_ERROR_RETRY = True
CELERY_WORKER_CONSUMER = "config.celery:WaitForRedisConsumer"
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_ROUTES = queues.ROUTES
CELERY_TASK_ANNOTATIONS = queues.ANNOTATIONS
# A task whose process dies runs once more, so each claims its row first: twice is once.
CELERY_TASK_ACKS_LATE = CELERY_TASK_REJECT_ON_WORKER_LOST = True
# What one process has fetched and not begun would wait for what it runs.
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_MAX_TASKS_PER_CHILD = 200
CELERY_WORKER_HIJACK_ROOT_LOGGER = False

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": ["rest_framework.authentication.SessionAuthentication"],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser"],
    "EXCEPTION_HANDLER": "inference.errors.exception_handler",
    "DEFAULT_PAGINATION_CLASS": "rest_framework.pagination.LimitOffsetPagination",
    "PAGE_SIZE": 50,
    # Of one person or key, by the scopes of views.
    "DEFAULT_THROTTLE_RATES": {"management": "600/min"},
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
}
SPECTACULAR_SETTINGS = {
    "TITLE": "Quire",
    "OAS_VERSION": "3.1.0",
    "COMPONENT_SPLIT_REQUEST": False,
    "POSTPROCESSING_HOOKS": [],
    "ENABLE_DJANGO_DEPLOY_CHECK": False,  # the document is of the gateway's URLs alone
    "SERVE_INCLUDE_SCHEMA": False,
}

# Invitations, new passwords. Without a server for it no mail is sent, and pages show links instead.
SMTP_URL = env.text("QUIRE_SMTP_URL", "")
globals().update(mail_settings(SMTP_URL, env.text("QUIRE_MAIL_FROM", "")))

LANGUAGE_CODE = "en"
TIME_ZONE = "UTC"
USE_TZ = True
FORMAT_MODULE_PATH = "config.formats"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

STATIC_URL = f"{FORCE_SCRIPT_NAME}/static/"
STATIC_ROOT = env.folder(
    "QUIRE_STATIC_ROOT", (DATA_DIR if IS_INSTALLED else BASE_DIR) / "staticfiles"
)
# Served from the apps' own folders: a fresh clone shows its admin without `collectstatic`.
SERVESTATIC_USE_FINDERS = True
SERVESTATIC_USE_STATIC_ROOT = False
SERVESTATIC_ALLOW_ALL_ORIGINS = False

# Bodies are bounded where they are read; Django's own limit is for the browser's forms.
DATA_UPLOAD_MAX_MEMORY_SIZE = QUIRE["MAX_BODY_BYTES"]

# "proxy": a proxy before Quire speaks TLS, sets X-Forwarded-Proto and drops a client's own.
# "direct": the ASGI server speaks TLS itself.
TLS = env.choice("QUIRE_TLS", "off", ("off", "proxy", "direct"))
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = SECURE_SSL_REDIRECT = TLS != "off"
SECURE_HSTS_SECONDS = env.integer("QUIRE_HSTS_SECONDS", 31_536_000) if TLS != "off" else 0
SECURE_HSTS_INCLUDE_SUBDOMAINS = SECURE_HSTS_PRELOAD = env.flag("QUIRE_HSTS_SUBDOMAINS")
if TLS == "proxy":
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
# Log-in, second factors, single sign-on: `accounts.settings` reads what may be set.
globals().update(identity_settings(secure=TLS != "off"))
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_PATH = CSRF_COOKIE_PATH = FORCE_SCRIPT_NAME or "/"
SESSION_COOKIE_SAMESITE = CSRF_COOKIE_SAMESITE = "Lax"
# Instances on other ports of one host share its cookies: their names keep them apart.
SESSION_COOKIE_NAME = env.text("QUIRE_SESSION_COOKIE", "quire_session")
CSRF_COOKIE_NAME = env.text("QUIRE_CSRF_COOKIE", "csrftoken")
# Sites whose pages may call the API from a browser; "*" is every site. Pages stay our own.
_origins = env.words("QUIRE_CORS_ORIGINS", [])
CORS_ALLOW_ALL_ORIGINS = _origins == ["*"]
CORS_ALLOWED_ORIGINS = [] if CORS_ALLOW_ALL_ORIGINS else _origins
CORS_URLS_REGEX = (
    r"^/(v1/.*|v2/rerank|tokenize|detokenize|pooling|classify|score|rerank|version|openapi\.json)$"
)
CORS_ALLOW_CREDENTIALS = env.flag("QUIRE_CORS_CREDENTIALS")
_methods = env.words("QUIRE_CORS_METHODS", ["*"])
CORS_ALLOW_METHODS = (
    ["DELETE", "GET", "OPTIONS", "PATCH", "POST", "PUT"] if _methods == ["*"] else _methods
)
_headers = env.words("QUIRE_CORS_HEADERS", ["*"])
CORS_ALLOW_HEADERS = [
    *("accept", "authorization", "content-type", "idempotency-key", "user-agent", "x-api-key"),
    *("x-request-id", "anthropic-beta", "anthropic-version"),
    "anthropic-dangerous-direct-browser-access",
    *("openai-beta", "openai-organization", "openai-project"),
    *(f"x-stainless-{name}" for name in ("arch", "helper-method", "lang", "os", "poll-helper")),
    *(f"x-stainless-{name}" for name in ("package-version", "retry-count", "runtime")),
    *(f"x-stainless-{name}" for name in ("runtime-version", "timeout", "custom-poll-interval")),
]
if _headers != ["*"]:
    CORS_ALLOW_HEADERS = [header.lower() for header in _headers]
CORS_EXPOSE_HEADERS = [
    *("x-request-id", "request-id", "openai-processing-ms", "retry-after", "retry-after-ms"),
    *("x-quire-ignored-fields", "x-quire-adapter", "x-quire-in-place-of", "idempotent-replayed"),
    *(
        f"x-ratelimit-{what}-{kind}"
        for what in ("limit", "remaining", "reset")
        for kind in ("requests", "tokens")
    ),
]

SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"

LOG_STYLE = env.choice("QUIRE_LOG_STYLE", "debug" if DEBUG else "line", ("line", "json", "debug"))
LOGGING = build_logging(env.text("QUIRE_LOG_LEVEL", "INFO").upper(), LOG_STYLE)
