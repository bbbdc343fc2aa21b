"""Environment variables that this installation reads: in groups, with what each one means.

How one is read, and its default, is where it's read (`common.settings` remembers both).
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from django.core.checks import CheckMessage, Warning
from django.core.exceptions import ImproperlyConfigured

from engine.contract.vllm_variables import unused_variables

# Values that are read are recorded with their defaults: `common.effective_settings` shows them to
# operators.

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")

#: Names of variables that flags of a command line have set, for the processes that it starts.
FROM_FLAGS = "QUIRE_FROM_FLAGS"
T = TypeVar("T")
#: Segments without "." and "..", and none that is empty: "//host" would lead to another one.
ROOT_PATH = re.compile(r"(/(?!\.{1,2}(/|$))[A-Za-z0-9._~-]+)*")


@dataclass(frozen=True)
class Reading:
    """A variable as it was read."""

    value: object = field(repr=False)
    default: object


READ: dict[str, Reading] = {}


def _noted(name: str, value: T, default: object) -> T:
    READ[name] = Reading(value, default)
    return value


def note_flags(names: list[str]) -> None:
    """Say of variables that flags have set them."""
    known = words(FROM_FLAGS, [])
    os.environ[FROM_FLAGS] = ",".join(dict.fromkeys([*known, *names]))


def secret(name: str) -> str:
    """Something that nobody may read but this process; "" when it's unset."""
    value = os.environ.get(name, "")
    _noted(name, bool(value), False)
    return value


def flag(name: str, default: bool = False) -> bool:
    """A switch. Raises ImproperlyConfigured unless it's 1/0, true/false, yes/no or on/off."""
    text = os.environ.get(name)
    if text is None:
        return _noted(name, default, default)
    word = text.strip().lower()
    if word not in TRUE + FALSE:
        raise ImproperlyConfigured(f"{name} must be true or false, got {text!r}.")
    return _noted(name, word in TRUE, default)


def integer(name: str, default: int, *, low: int = 0, high: int = 2**63 - 1) -> int:
    """A whole number in [low, high]. Raises ImproperlyConfigured otherwise."""
    text = os.environ.get(name)
    if text is None or not text.strip():
        return _noted(name, default, default)
    try:
        value = int(text)
    except ValueError:
        raise ImproperlyConfigured(f"{name} must be a whole number, got {text!r}.") from None
    if not low <= value <= high:
        raise ImproperlyConfigured(f"{name} must be in [{low}, {high}], got {value}.")
    return _noted(name, value, default)


def currency(name: str, default: str) -> str:
    """Three letters, made small. Raises ImproperlyConfigured otherwise."""
    value = (os.environ.get(name) or default).strip().lower()
    if not (len(value) == 3 and value.isascii() and value.isalpha()):
        raise ImproperlyConfigured(f"{name} must be three letters such as usd, got {value!r}.")
    return _noted(name, value, default)


def choice(name: str, default: str, allowed: tuple[str, ...]) -> str:
    """One of some words. Raises ImproperlyConfigured otherwise."""
    value = os.environ.get(name, default).strip().lower()
    if value not in allowed:
        raise ImproperlyConfigured(f"{name} must be one of {', '.join(allowed)}; got {value!r}.")
    return _noted(name, value, default)


def text(name: str, default: str) -> str:
    """Some text; set but empty counts as unset."""
    return _noted(name, os.environ.get(name, "").strip() or default, default)


def root_path(name: str) -> str:
    """A path such as "/quire", or "". Raises ImproperlyConfigured for anything else."""
    path = os.environ.get(name, "").strip()
    if not ROOT_PATH.fullmatch(path):
        raise ImproperlyConfigured(f"{name} must be a path such as /quire, got {path!r}.")
    return _noted(name, path, "")


def words(name: str, default: list[str]) -> list[str]:
    """A comma-separated list without empty entries."""
    text = os.environ.get(name)
    if text is None:
        return _noted(name, default, default)
    return _noted(name, [word.strip() for word in text.split(",") if word.strip()], default)


def mapping(name: str) -> dict[str, Any]:
    """A JSON object; unset: an empty one. Raises ImproperlyConfigured for anything else."""
    try:
        found = json.loads(os.environ.get(name, "").strip() or "{}")
    except ValueError as error:
        raise ImproperlyConfigured(f"{name} must be a JSON object: {error}.") from None
    if not isinstance(found, dict):
        raise ImproperlyConfigured(f"{name} must be a JSON object.")
    return _noted(name, found, {})


def networks(name: str) -> tuple[str, ...]:
    """Comma-separated IP addresses or networks. Raises ImproperlyConfigured for anything else."""
    found = []
    for word in words(name, []):
        try:
            found.append(str(ipaddress.ip_network(word)))
        except ValueError as error:
            raise ImproperlyConfigured(f"{name}: {error}.") from None
    return _noted(name, tuple(found), ())


def folder(name: str, default: Path) -> Path:
    """An absolute path; nothing is created."""
    return _noted(name, Path(os.environ.get(name) or default).expanduser().resolve(), default)


def folders(name: str, default: list[Path]) -> list[Path]:
    """A comma-separated list of folders, as absolute paths; nothing is created."""
    given = words(name, [])
    found = [Path(word).expanduser().resolve() for word in given] if given else default
    return _noted(name, found, default)


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


#: What nobody sets for an installation: for developers, tests, and processes among themselves.
NO_SETTINGS = frozenset(
    {
        *("QUIRE_CACHE_DIR", "QUIRE_CHAOS_RELAY", "QUIRE_KERNELS"),
        *("QUIRE_CPU_BUILD_TIMEOUT", "QUIRE_CPU_ISA", "QUIRE_CPU_SANITIZE", "QUIRE_TERMINAL"),
        "QUIRE_STEP_RECORD",
        FROM_FLAGS,
    }
)
#: QUIRE_TEST_..., QUIRE_SUITE_...: of the tests' own.
OF_TESTS = ("TEST", "SUITE")


def unknown_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """A sentence for each variable that begins as one of Quire's or vLLM's and does nothing."""
    known = {name for group in GROUPS.values() for name in group}
    found = sorted(
        name
        for name in environment
        if name.startswith("QUIRE_")
        and name.split("_")[1] not in OF_TESTS
        and name not in known | NO_SETTINGS
    )
    sentences = [
        f"{name} is no setting and changes nothing.{_meant(name, known)}" for name in found
    ]
    return [*sentences, *unused_variables(environment)]


def check_variables(**_: Any) -> list[CheckMessage]:
    """For `manage.py check`."""
    return [Warning(sentence, id="config.W001") for sentence in unknown_variables()]


def _meant(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.8)
    return f" Did you mean {close[0]}?" if close else ""
