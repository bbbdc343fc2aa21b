"""Hashes that identify a block by its content and everything before it.

A block's hash covers its parent's hash, its own token ids and the keys of what begins in it beside
them: in a sequence's first block its scope (cache namespace, adapter), in others an image or
vectors that stand in the prompt from there on. The chain carries each key onwards, so two tenants'
equal prompts never share a block, while what stands before an image is shared by all who sent it.
sha256 leaves no collisions to speak of, which matters because a collision would show one client's
text to another. Bytes are laid out by us, not by a serialiser, so that hashes are the same in every
process.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

#: The parent of first blocks; as long as any other, so that tokens never take its place.
ROOT = bytes(32)


class ContentKey(NamedTuple):
    """What stands in a prompt from one of its tokens on and can't be told from token ids."""

    #: The first token that depends on it.
    position: int
    #: sha256 of the content, whole.
    digest: bytes


def scope_key(namespace: str, adapter: str = "") -> bytes:
    """What sets whole sequences apart; length-prefixed, so that fields can't run over.

    `adapter` is a digest. Empty when there is nothing to tell apart.
    """
    parts = (namespace, adapter)
    return b"".join(map(_prefixed, (part.encode() for part in parts))) if any(parts) else b""


def hash_block(parent: bytes, token_ids: Sequence[int], extra: bytes = b"") -> bytes:
    """Hash of a full block: 32 bytes.

    Args:
        parent: the previous block's hash, or `ROOT` for the first block.
        token_ids: the block's tokens, exactly block_size of them.
        extra: see `extra_of`.
    """
    digest = hashlib.sha256(parent)
    digest.update(array("i", token_ids).tobytes())
    if extra:
        digest.update(extra)
    return digest.digest()


def extra_of(scope: bytes, content: Sequence[ContentKey], start: int) -> bytes:
    """What the keys that begin in a block add to its hash; empty when none does.

    `start`: the block's first token, from which positions are counted.
    """
    if not scope and not content:
        return b""
    places = [
        (position - start).to_bytes(4, "little") + _prefixed(key) for position, key in content
    ]
    return b"".join([_prefixed(scope), *places])


def group_key(group: int) -> bytes:
    """What a KV cache group adds to a block's hash to make its key in the pool."""
    return group.to_bytes(2, "little")


class BlockHashes:
    """The hashes of one sequence's full blocks, made as they're asked for.

    They depend on tokens alone, so they survive a preemption.

    Attributes:
        scope: see `scope_key`; told in the first block.
        content: in order of position; each is told in the block where it begins.
        values: the hashes so far.
    """

    __slots__ = ("content", "scope", "values")

    def __init__(self, scope: bytes = b"", content: Sequence[ContentKey] = ()) -> None:
        self.scope = scope
        self.content = tuple(content)
        self.values: list[bytes] = []

    def extend(self, token_ids: list[int], block_size: int) -> list[bytes]:
        """Hash those of the tokens' full blocks that aren't hashed yet; all hashes."""
        values = self.values
        last = self.content[-1].position if self.content else -1
        for start in range(len(values) * block_size, len(token_ids) - block_size + 1, block_size):
            extra = b""
            if last >= start or not start:
                content = self._begun_in(start, start + block_size)
                extra = extra_of(b"" if start else self.scope, content, start)
            parent = values[-1] if values else ROOT
            values.append(hash_block(parent, token_ids[start : start + block_size], extra))
        return values

    def copy(self) -> BlockHashes:
        """The same for a sequence that goes on from this one's tokens."""
        copy = BlockHashes(self.scope, self.content)
        copy.values = self.values.copy()
        return copy

    def _begun_in(self, start: int, end: int) -> Sequence[ContentKey]:
        """Keys of what begins at tokens [start, end)."""
        if not self.content:
            return ()
        return self.content[
            bisect_left(self.content, start, key=_position) : bisect_left(
                self.content, end, key=_position
            )
        ]


def _position(key: ContentKey) -> int:
    return key.position


def _prefixed(part: bytes) -> bytes:
    """Bytes with their length before them."""
    return len(part).to_bytes(4, "little") + part
