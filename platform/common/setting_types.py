"""Types of settings: how an environment variable's text is read and checked."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs, urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ByteSize, Field, SecretStr

from common.installation import PROGRAM
from engine.contract.errors import ConfigError
from engine.contract.observability import check_endpoint

MIB, GIB = 1 << 20, 1 << 30
ROLES = ("owner", "admin", "member", "viewer")
OPERATOR = "operator"


def _split(value: object) -> object:
    """Split a comma-separated list."""
    if not isinstance(value, str):
        return value
    return tuple(word.strip() for word in value.split(",") if word.strip())


def split_pairs(value: object) -> object:
    """Parse `name=value,...` into a dictionary; names may contain "=", values may not."""
    if not isinstance(value, str):
        return value
    pairs = {}
    for word in value.split(","):
        if not word.strip():
            continue
        name, equals, target = word.strip().rpartition("=")
        if not (equals and name and target):
            raise ValueError("must be a list such as name=value,name=value")
        pairs[name.strip()] = target.strip()
    return pairs


def _parse_object(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise ValueError("must be a JSON object")
    return parsed


def _check_network(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text))
    except ValueError as error:
        raise ValueError(f"must be IP addresses or networks: {error}") from None


def check_currency(text: str) -> str:
    if not (len(text) == 3 and text.isascii() and text.isalpha()):
        raise ValueError("must be three letters such as usd")
    return text.lower()


#: Segments without "." and "..", and none that is empty: "//host" would name another host.
ROOT_PATH = re.compile(r"(/(?!\.{1,2}(/|$))[A-Za-z0-9._~-]+)*")


def check_root_path(text: str) -> str:
    if not ROOT_PATH.fullmatch(text):
        raise ValueError("must be a path such as /quire")
    return text


def check_address(url: str) -> str:
    """Validate a URL. Raises ValueError without the URL: in an invalid one, the port's position may
    hold the rest of a password that contains a slash.
    """
    try:
        urlsplit(url).port  # noqa: B018 - parses the port, and raises if it is invalid
    except ValueError:
        raise ValueError(
            "must be a URL. In a password write /, #, ?, : and @ as %2F, %23, %3F, %3A and %40"
        ) from None
    return url


def check_scheme(*schemes: str, hint: str = "") -> Callable[[str], str]:
    allowed = " or ".join(f"{scheme}://" for scheme in schemes)

    def check(url: str) -> str:
        if url and urlsplit(url).scheme not in schemes:
            raise ValueError(f"must start with {allowed}{hint}")
        return check_address(url)

    return check


def check_database_url(url: str) -> str:
    hint = ". Unset, Quire keeps SQLite in its data directory"
    check_scheme("postgres", "postgresql", "sqlite", hint=hint)(url)
    for size in parse_qs(urlsplit(url).query, keep_blank_values=True).get("pool_size", []):
        if not (size.isdecimal() and int(size)):
            raise ValueError("must have a pool_size of at least 1")
    return url


def check_redis_url(url: str) -> str:
    if "sentinel" in url.partition(":")[0]:
        raise ValueError(
            "must name one server: Sentinels aren't asked who the primary is. Name an address that "
            "follows it, such as a proxy's"
        )
    hint = f". Unset, `{PROGRAM} up` runs a Redis of its own"
    return check_scheme("redis", "rediss", "unix", hint=hint)(url)


def check_smtp_url(url: str) -> str:
    check = check_scheme("smtp", "smtps", "smtp+starttls", hint=" and name a host")
    if url and not urlsplit(check(url)).hostname:
        raise ValueError("must name a host")
    return url


def check_issuer(url: str) -> str:
    if url and not url.startswith(("https://", "http://localhost", "http://127.0.0.1")):
        raise ValueError("must be an https:// address")
    return url


def check_traces_endpoint(url: str) -> str:
    try:
        return check_endpoint(url) if url else url
    except ConfigError:
        raise ValueError(
            "must be an address such as http://127.0.0.1:4318 or grpc://127.0.0.1:4317"
        ) from None


def _check_role(name: str) -> str:
    if name not in (OPERATOR, *ROLES):
        raise ValueError(f"must be one of {', '.join((OPERATOR, *ROLES))}")
    return name


def _check_group_target(target: str) -> str:
    tenant, colon, role = target.partition(":")
    if target != OPERATOR and not (colon and tenant and role in ROLES):
        raise ValueError(f"must be {OPERATOR} or tenant:role, with a role of {', '.join(ROLES)}")
    return target


def check_object_storage(text: SecretStr) -> SecretStr:
    if not text.get_secret_value():
        return text
    entry = _parse_object(text.get_secret_value())
    if not (
        isinstance(entry, dict)
        and isinstance(entry.get("BACKEND"), str)
        and isinstance(entry.get("OPTIONS", {}), dict)
        and entry.keys() <= {"BACKEND", "OPTIONS"}
    ):
        raise ValueError(
            'must be such as {"BACKEND": "storages.backends.s3.S3Storage", "OPTIONS": {}}'
        )
    return text


Words = Annotated[tuple[str, ...], BeforeValidator(_split)]
Secrets = Annotated[tuple[SecretStr, ...], BeforeValidator(_split)]
JsonObject = Annotated[dict[str, Any], BeforeValidator(_parse_object)]
Directory = Annotated[Path, AfterValidator(lambda path: path.expanduser().resolve())]
Directories = Annotated[tuple[Directory, ...], BeforeValidator(_split)]
Networks = Annotated[
    tuple[Annotated[str, AfterValidator(_check_network)], ...], BeforeValidator(_split)
]
Roles = Annotated[tuple[Annotated[str, AfterValidator(_check_role)], ...], BeforeValidator(_split)]
GroupRoles = Annotated[
    dict[str, Annotated[str, AfterValidator(_check_group_target)]], BeforeValidator(split_pairs)
]
#: In bytes; a string may have a unit: 10MiB.
Bytes = Annotated[ByteSize, AfterValidator(int), Field(ge=1)]
#: A URL that may contain a password, which is never in a `repr` or displayed.
Address = Annotated[str, Field(repr=False)]


class TenantQuotas(BaseModel, frozen=True, extra="forbid"):
    """Default quotas of tenants. 0 is no limit, unless a minimum says otherwise."""

    requests_per_minute: int = Field(default=0, ge=0)
    tokens_per_minute: int = Field(default=0, ge=0)
    running_batches: int = Field(default=4, ge=1)
    running_responses: int = Field(default=16, ge=1)
    open_batches: int = Field(default=100, ge=0)
    open_responses: int = Field(default=1000, ge=0)
    stored_chars: int = Field(default=10 * GIB, ge=0)
    file_bytes: ByteSize = Field(default=ByteSize(10 * GIB), ge=0)
    adapter_bytes: ByteSize = Field(default=ByteSize(10 * GIB), ge=0)
    idempotency_bytes: ByteSize = Field(default=ByteSize(16 * MIB), ge=1)
