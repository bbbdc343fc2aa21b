"""Public names of stored objects: 128 random bits, so that none can be guessed."""

import hashlib
import re
import secrets

_SHAPE = re.compile(r"[a-z]+[-_][0-9a-f]{32}")


def new_id(prefix: str) -> str:
    """`prefix` (which ends in "-" or "_") and 32 hexadecimal digits."""
    return prefix + secrets.token_hex(16)


def derived_id(prefix: str, of: str) -> str:
    """One that is the same each time. `of` must hold random bits, or it could be guessed."""
    return prefix + hashlib.sha256(of.encode()).hexdigest()[:32]


def is_id(text: str) -> bool:
    """Whether the text has the shape of an id of ours. What has not is never looked up."""
    return _SHAPE.fullmatch(text) is not None
