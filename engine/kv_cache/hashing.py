"""Hashes that identify a block by its content and everything before it.

A block's hash covers its parent's hash, its own token ids and, in a sequence's first block, the
extra keys (cache namespace, adapter, images). The chain carries the extra keys onwards, so that two
tenants' equal prompts never share a block. sha256 leaves no collisions to speak of, which matters
because a collision would show one client's text to another. Bytes are laid out by us, not by a
serialiser, so that hashes are the same in every process.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

ROOT = b""


def extra_key(namespace: str, adapter: str = "", images: Sequence[str] = ()) -> bytes:
    """The extra keys of a sequence's first block; length-prefixed, so that fields can't run over.

    Empty when there is nothing to tell apart.
    """
    parts = [namespace, adapter, *images]
    if not any(parts):
        return b""
    encoded = [part.encode() for part in parts]
    return b"".join(len(part).to_bytes(4, "little") + part for part in encoded)


def hash_block(parent: bytes, token_ids: Sequence[int], extra: bytes = b"") -> bytes:
    """Hash of a full block: 32 bytes.

    Args:
        parent: the previous block's hash, or `ROOT` for the first block.
        token_ids: the block's tokens, exactly block_size of them.
        extra: see `extra_key`; only for the first block.
    """
    digest = hashlib.sha256(parent)
    digest.update(array("i", token_ids).tobytes())
    if extra:
        digest.update(extra)
    return digest.digest()


def group_key(group: int) -> bytes:
    """What a KV cache group adds to a block's hash to make its key in the pool."""
    return group.to_bytes(2, "little")
