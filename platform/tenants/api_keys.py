"""API keys as text: made, taken apart, hashed.

A key is `sk-quire-` + 10 characters that name it + 43 secret ones, letters and digits throughout.
The secret half carries 256 bits from the system's generator, so nothing can guess it and a fast
hash is enough: slow ones (PBKDF2, Argon2) exist to make up for passwords' lack of entropy, and
would cost each request milliseconds here for nothing. What the database holds can't be turned back.
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
    """The scopes of a key for which none were named."""
    return sorted(DEFAULT)


PREFIX = "sk-quire-"
PUBLIC_CHARS, SECRET_CHARS = 10, 43  # 62**43 > 2**256
ALPHABET = string.ascii_letters + string.digits
#: No key is longer, so a longer text is cut before it's hashed: a megabyte costs what a key costs.
MAX_CHARS = len(PREFIX) + PUBLIC_CHARS + SECRET_CHARS + 1
#: Shorter ones could be guessed within a day, whatever bounds guesses.
MIN_OPERATOR_KEY_CHARS = 8
_SHAPE = re.compile(rf"{PREFIX}([A-Za-z0-9]{{{PUBLIC_CHARS}}})[A-Za-z0-9]{{{SECRET_CHARS}}}")


def new_public_id() -> str:
    """A random name for a key: unique enough that a clash is an error worth raising."""
    return "".join(secrets.choice(ALPHABET) for _ in range(PUBLIC_CHARS))


def new_key(public_id: str) -> str:
    """The text that its owner keeps."""
    return PREFIX + public_id + "".join(secrets.choice(ALPHABET) for _ in range(SECRET_CHARS))


def hash_key(key: str) -> str:
    """sha256 of the text in hex, [64]. Only as much of it as a key can be long."""
    return hashlib.sha256(key[:MAX_CHARS].encode("utf-8", "surrogatepass")).hexdigest()


def lookup_id(key: str) -> str:
    """Under which name a key is kept: its own, or for a text of another shape one made from it."""
    return public_id_of(key) or "given-" + hash_key(key)[:10]


def validate_operator_key(key: str) -> None:
    """Raise `InvalidRequest` unless this text, of an operator's own, can be a key."""
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
    """The name in a well-formed key, else None."""
    match = _SHAPE.fullmatch(key) if len(key) < MAX_CHARS else None
    return match.group(1) if match else None
