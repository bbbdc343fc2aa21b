"""Which questions are held out of training: decided by a hash, so no list needs to be kept."""

from __future__ import annotations

import hashlib
import re

HELD_OUT_SHARE = 8  # percent


def normalize(key: str) -> str:
    """Case and punctuation do not make another question; signs between numbers do."""
    return " ".join(re.findall(r"[^\W_]+|[+*/-]", key.casefold()))


def held_out(key: str) -> bool:
    """Whether the question belongs to the test set, the same on every machine."""
    digest = hashlib.sha256(normalize(key).encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_SHARE
