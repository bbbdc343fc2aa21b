"""API keys as text: generating, parsing and hashing them.

A key is `sk-quire-` + 10 characters of a public id + 43 secret ones, all letters and digits. The
secret half carries 256 bits from the system's generator, so it can't be guessed and a fast hash is
enough: slow ones (PBKDF2, Argon2) compensate for passwords' lack of entropy, and would only add
milliseconds to each request here. The hash in the database can't be reversed.
"""

import hashlib
import re
import secrets
import string

from engine.contract.errors import InvalidRequest

INFERENCE = "inference"  # generate, embed, tokenize
MODELS = "models:read"  # list models
USAGE = "usage:read"  # read the tenant's own usage
TENANT_ADMIN = "tenant:admin"  # manage members, keys and the like, with the holder's role
OPERATOR = "operator"  # reset caches, read server internals; given by superusers alone

ALL = frozenset({INFERENCE, MODELS, USAGE, TENANT_ADMIN, OPERATOR})
DEFAULT = frozenset({INFERENCE, MODELS, USAGE})


def check_scopes(scopes: object) -> list[str]:
    """The scopes sorted. Raises `InvalidRequest` for an unknown one or none at all."""
    if not isinstance(scopes, list | tuple | set | frozenset) or not scopes:
        raise InvalidRequest("scopes must be a list with at least one scope.", param="scopes")
    for scope in scopes:
        if not isinstance(scope, str) or scope not in ALL:
            scope_names = ", ".join(sorted(ALL))
            raise InvalidRequest(
                f"{scope!r} isn't a scope. Scopes are {scope_names}.", param="scopes"
            )
    return sorted(set(scopes))


def default_scopes() -> list[str]:
    return sorted(DEFAULT)


PREFIX = "sk-quire-"
PUBLIC_CHARS, SECRET_CHARS = 10, 43  # 62**43 > 2**256
ALPHABET = string.ascii_letters + string.digits
#: No key is longer, so longer texts are truncated before hashing: a megabyte costs no more.
MAX_CHARS = len(PREFIX) + PUBLIC_CHARS + SECRET_CHARS + 1
#: Shorter ones could be guessed within a day, whatever rate limits apply.
MIN_OPERATOR_KEY_CHARS = 8
_SHAPE = re.compile(rf"{PREFIX}([A-Za-z0-9]{{{PUBLIC_CHARS}}})[A-Za-z0-9]{{{SECRET_CHARS}}}")


def new_public_id() -> str:
    """A random public id: a collision is so unlikely that it may raise an error."""
    return "".join(secrets.choice(ALPHABET) for _ in range(PUBLIC_CHARS))


def new_key(public_id: str) -> str:
    """The full text, which only its owner keeps."""
    return PREFIX + public_id + "".join(secrets.choice(ALPHABET) for _ in range(SECRET_CHARS))


def hash_key(key: str) -> str:
    """sha256 of the text in hex, [64], truncated to a key's maximum length."""
    return hashlib.sha256(key[:MAX_CHARS].encode("utf-8", "surrogatepass")).hexdigest()


def lookup_id(key: str) -> str:
    """The public id that a key is stored under: its own, or derived from a text of another form."""
    return public_id_of(key) or "given-" + hash_key(key)[:10]


def validate_operator_key(key: str) -> None:
    """Raise `InvalidRequest` unless this text, chosen by an operator, can be a key."""
    if (
        not MIN_OPERATOR_KEY_CHARS <= len(key) < MAX_CHARS
        or not key.isascii()
        or not key.isprintable()
    ):
        raise InvalidRequest(
            f"An API key has {MIN_OPERATOR_KEY_CHARS} to {MAX_CHARS - 1} printable characters.",
            param="api_key",
        )


def public_id_of(key: str) -> str | None:
    """The public id in a well-formed key, else None."""
    match = _SHAPE.fullmatch(key) if len(key) < MAX_CHARS else None
    return match.group(1) if match else None
