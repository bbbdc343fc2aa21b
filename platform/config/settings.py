"""Settings. Nothing needs to be set for the embedded default; `docs/settings.md` lists them.

Embedded: SQLite and an embedded Redis in the data dir. Production: `DATABASE_URL`, `REDIS_URL`.
"""

import hashlib
import sys
from typing import Any

from accounts.mail import mail_settings
from accounts.settings import identity_settings
from common.files import make_private, secret_key
from common.installation import BASE_DIR
from common.settings_environment import load_settings
from config import queues
from config.connections import celery_url, channel_host, database, socket_url
from config.logging import build_logging
from engine.system.light_imports import import_redis

import_redis()

#: The operator's settings. The rest of this module follows from them.
QUIRE = load_settings()
DATA_DIR = QUIRE.data_dir
DEBUG = QUIRE.debug
DEFAULT_EXCEPTION_REPORTER_FILTER = "config.debug_report.WithoutAddresses"

SECRET_KEY = QUIRE.secret_key.get_secret_value() or secret_key(DATA_DIR)
SECRET_KEY_FALLBACKS = [key.get_secret_value() for key in QUIRE.secret_key_fallbacks]
ALLOWED_HOSTS = list(QUIRE.allowed_hosts)
CSRF_TRUSTED_ORIGINS = list(QUIRE.trusted_origins)
# Path prefix below which a proxy serves Quire, such as "/quire"; set by --root-path.
FORCE_SCRIPT_NAME = QUIRE.root_path

if not QUIRE.database_url:
    make_private(DATA_DIR)
DATABASES = {"default": database(QUIRE.database_url, DATA_DIR)}
REDIS_URL = QUIRE.redis_url or socket_url(DATA_DIR)

INSTALLED_APPS = [
    # Before staticfiles, so that `runserver` uses ASGI. Nothing else needs all of Twisted.
    *(["daphne"] if sys.argv[1:2] == ["runserver"] else []),
    "django_prometheus",
    "config.apps.QuireAdminConfig",  # django.contrib.admin
    "tenants",  # before auth, whose `changepassword` it overrides
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "servestatic.runserver_nostatic",  # serve static files the same way with and without DEBUG
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
    # Present in a clone, absent from an image.
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
# Names, not paths: a proxy may serve Quire below a prefix.
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "playground"

# For pages only: the API's requests bypass these, see `inference.edge.handler`.
MIDDLEWARE = [
    "django_prometheus.middleware.PrometheusBeforeMiddleware",
    "corsheaders.middleware.CorsMiddleware",
    "tenants.audit.client_ip_middleware",
    "django.middleware.security.SecurityMiddleware",
    "console.csp.content_security_policy",
    "config.compression.static_files",
    "django.middleware.gzip.GZipMiddleware",  # pads bodies to hide their length (BREACH)
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
                "console.context_processors.frame",
            ]
        },
    }
]

CACHES = {
    "default": {
        "BACKEND": "config.cache.CountedRedisCache",
        "LOCATION": REDIS_URL,
        "KEY_PREFIX": f"{QUIRE.key_prefix}:cache",
        "OPTIONS": {
            "serializer": "config.cache.JsonSerializer",
            "pool_class": "engine.system.redis_client.FailoverConnectionPool",
        },
    }
}
CHANNEL_LAYERS = {
    "default": {
        "BACKEND": "channels_redis.pubsub.RedisPubSubChannelLayer",
        "CONFIG": {"hosts": [channel_host(REDIS_URL)], "prefix": f"{QUIRE.key_prefix}:channels"},
    }
}

CELERY_BROKER_URL = celery_url(REDIS_URL)
CELERY_TASK_SERIALIZER = CELERY_RESULT_SERIALIZER = "json"  # never pickle
CELERY_ACCEPT_CONTENT = ["json"]
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_TRANSPORT_OPTIONS: dict[str, Any] = {
    "global_keyprefix": f"{QUIRE.key_prefix}:celery:",
    # Who sends a task waits for no broker that is away: workers find the work in the database.
    "max_retries": 0,
}
# READONLY, MISCONF and OOM are temporary errors: without this they would end a worker.
CELERY_BROKER_CHANNEL_ERROR_RETRY = True
CELERY_WORKER_CONSUMER = "config.celery:WaitForRedisConsumer"
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_ROUTES = queues.ROUTES
CELERY_TASK_ANNOTATIONS = queues.ANNOTATIONS
# A task whose process dies runs again, so each task claims its row first to run only once.
CELERY_TASK_ACKS_LATE = CELERY_TASK_REJECT_ON_WORKER_LOST = True
# Tasks that a process prefetches would wait for its running task.
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
    # Per user or API key, by the scopes of views.
    "DEFAULT_THROTTLE_RATES": {"management": "600/min"},
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
}
SPECTACULAR_SETTINGS = {
    "TITLE": "Quire",
    "OAS_VERSION": "3.1.0",
    "COMPONENT_SPLIT_REQUEST": False,
    "POSTPROCESSING_HOOKS": [],
    "ENABLE_DJANGO_DEPLOY_CHECK": False,  # it would check the schema of the default URLconf
    "SERVE_INCLUDE_SCHEMA": False,
}

# For invitations and password resets. Without a mail server, pages show the links instead.
globals().update(mail_settings(QUIRE.smtp_url, QUIRE.mail_from))

LANGUAGE_CODE = "en"
TIME_ZONE = "UTC"
USE_TZ = True
FORMAT_MODULE_PATH = "config.formats"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"},
    **QUIRE.storages,
}
STATIC_URL = f"{FORCE_SCRIPT_NAME}/static/"
# Where `collectstatic` puts files if a proxy serves them.
STATIC_ROOT = BASE_DIR / "staticfiles"
# Served from the apps' folders: a fresh clone needs no `collectstatic`.
SERVESTATIC_USE_FINDERS = True
SERVESTATIC_USE_STATIC_ROOT = False
SERVESTATIC_ALLOW_ALL_ORIGINS = False

# The API checks the size of a body as it reads it; this limit applies to browser forms.
DATA_UPLOAD_MAX_MEMORY_SIZE = QUIRE.max_body_bytes

# "proxy": a proxy in front of Quire terminates TLS, sets X-Forwarded-Proto and drops a client's.
# "direct": the ASGI server terminates TLS itself.
_uses_tls = QUIRE.tls != "off"
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = SECURE_SSL_REDIRECT = _uses_tls
SECURE_HSTS_SECONDS = 31_536_000 if _uses_tls else 0  # a year, the least that preload lists take
# Only the operator of the proxy knows whether all subdomains use TLS.
SILENCED_SYSTEM_CHECKS = ["security.W005", "security.W021"]
if QUIRE.tls == "proxy":
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
# Login, two-factor authentication, single sign-on.
globals().update(identity_settings(QUIRE))
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_PATH = CSRF_COOKIE_PATH = FORCE_SCRIPT_NAME or "/"
SESSION_COOKIE_SAMESITE = CSRF_COOKIE_SAMESITE = "Lax"
# Browsers share cookies between the ports of a host, so each instance names its cookies after its
# oldest accepted secret key: people stay signed in while the key is rotated.
_instance = hashlib.sha256([SECRET_KEY, *SECRET_KEY_FALLBACKS][-1].encode()).hexdigest()[:8]
SESSION_COOKIE_NAME, CSRF_COOKIE_NAME = f"quire_session_{_instance}", f"quire_csrf_{_instance}"
# Sites whose pages may call the API from a browser; "*" means any. Doesn't apply to Quire's pages.
CORS_ALLOW_ALL_ORIGINS = QUIRE.cors_origins == ("*",)
CORS_ALLOWED_ORIGINS = [] if CORS_ALLOW_ALL_ORIGINS else list(QUIRE.cors_origins)
CORS_URLS_REGEX = (
    r"^/(v1/.*|v2/rerank|tokenize|detokenize|pooling|classify|score|rerank|version|openapi\.json)$"
)
CORS_ALLOW_CREDENTIALS = QUIRE.cors_credentials
CORS_ALLOW_METHODS = ["DELETE", "GET", "OPTIONS", "PATCH", "POST", "PUT"]
if QUIRE.cors_methods != ("*",):
    CORS_ALLOW_METHODS = list(QUIRE.cors_methods)
CORS_ALLOW_HEADERS = [
    *("accept", "authorization", "content-type", "idempotency-key", "user-agent", "x-api-key"),
    *("x-request-id", "anthropic-beta", "anthropic-version"),
    "anthropic-dangerous-direct-browser-access",
    *("openai-beta", "openai-organization", "openai-project"),
    *(f"x-stainless-{name}" for name in ("arch", "helper-method", "lang", "os", "poll-helper")),
    *(f"x-stainless-{name}" for name in ("package-version", "retry-count", "runtime")),
    *(f"x-stainless-{name}" for name in ("runtime-version", "timeout", "custom-poll-interval")),
]
if QUIRE.cors_headers != ("*",):
    CORS_ALLOW_HEADERS = [header.lower() for header in QUIRE.cors_headers]
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

LOGGING = build_logging(QUIRE.log_level, QUIRE.log_style)
