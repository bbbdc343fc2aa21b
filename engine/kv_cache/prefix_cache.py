"""Hashes that identify a block by its content and everything before it.

A block's hash covers its parent's hash, its token ids and the keys of additional content that
begins in it: in a sequence's first block its scope (cache namespace, adapter), in others an image
or vectors in the prompt from there on. The chain carries each key onwards, so equal prompts of two
tenants never share a block, while the prompt before an image is shared by all requests with it.
sha256 makes collisions practically impossible, which matters because a collision would show one
client's text to another. We lay out the bytes ourselves, rather than by a serializer, so that
hashes are equal in every process.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

#: Whether block `index` of the prompt is cached for the group with this key suffix.
IsCached = Callable[[int, bytes], bool]


@dataclass(frozen=True, slots=True)
class HitRequirement:
    """KV cache groups with the same attention type.

    Attributes:
        num_required_blocks: number of blocks before a block's first token that this token attends
            to; None: all of them.
        suffixes: key suffixes of the groups; a block is a hit if it's cached in each of them.
    """

    num_required_blocks: int | None
    suffixes: tuple[bytes, ...]


def longest_common_hit(types: list[HitRequirement], max_blocks: int, cached: IsCached) -> int:
    """Blocks of the longest prefix, at most `most`, that is a hit in every attention type.

    Full attention needs all blocks of the prefix and is searched from the left; it goes first. A
    window needs only the last blocks and is searched from the right, within the previous results.
    Shortening one type's hit may invalidate another window's, so the windows are searched in turns
    until they agree; a shorter prefix is always a hit in full attention, too.
    """
    hit = max_blocks
    while True:
        previous_hit = hit
        for kind in types:
            if kind.num_required_blocks is not None:
                hit = _last_window_hit(kind, kind.num_required_blocks, hit, cached)
            elif hit == max_blocks:
                suffixes = kind.suffixes
                missing = (i for i in range(hit) if not all(cached(i, one) for one in suffixes))
                hit = next(missing, hit)
        if (
            hit == previous_hit
            or len(types) < 2
            or (len(types) == 2 and types[0].num_required_blocks is None)
        ):
            return hit


def _last_window_hit(kind: HitRequirement, reach: int, max_blocks: int, cached: IsCached) -> int:
    """The largest end <= most such that the `reach` blocks before it are cached (or all, if fewer).

    A miss rules out every window that contains it. So windows are scanned from their left, and one
    miss usually moves the search by a whole window: a cold prompt costs one lookup per window.
    """
    end = max_blocks
    cached_start = end  # blocks [known, end) are cached
    while end > 0:
        start = max(0, end - reach)
        for index in range(start, min(cached_start, end)):
            if not all(cached(index, suffix) for suffix in kind.suffixes):
                # [start, index) are cached: the next window, which ends at index, may use them.
                end, cached_start = index, start
                break
        else:
            return end
    return 0


#: Parent of first blocks; as long as any other, so that tokens are never mistaken for it.
ROOT = bytes(32)


class ContentKey(NamedTuple):
    """Content of a prompt, from one of its tokens on, that its token ids don't identify."""

    #: The first token that depends on it.
    position: int
    #: sha256 of the full content.
    digest: bytes


def namespace_key(namespace: str, adapter: str = "") -> bytes:
    """Key that separates sequences' scopes; length-prefixed, so that fields are unambiguous.

    `adapter` is a digest. Empty if there is nothing to separate.
    """
    parts = (namespace, adapter)
    return b"".join(map(_prefixed, (part.encode() for part in parts))) if any(parts) else b""


def hash_block(parent: bytes, token_ids: Sequence[int], extra: bytes = b"") -> bytes:
    """Hash of a full block: 32 bytes.

    Args:
        parent: the previous block's hash, or `ROOT` for the first block.
        token_ids: the block's tokens, exactly block_size of them.
        extra: see `extra_keys`.
    """
    digest = hashlib.sha256(parent)
    digest.update(array("i", token_ids).tobytes())
    if extra:
        digest.update(extra)
    return digest.digest()


def extra_keys(scope: bytes, content: Sequence[ContentKey], start: int) -> bytes:
    """Bytes that the keys which begin in a block add to its hash; empty if there are none.

    `start`: position of the block's first token.
    """
    if not scope and not content:
        return b""
    keys = [(position - start).to_bytes(4, "little") + _prefixed(key) for position, key in content]
    return b"".join([_prefixed(scope), *keys])


def group_key(group: int) -> bytes:
    """Suffix that a KV cache group appends to a block's hash to make its key in the pool."""
    return group.to_bytes(2, "little")


class BlockHashes:
    """The hashes of one sequence's full blocks, computed on demand.

    They depend on tokens alone, so they survive a preemption.

    Attributes:
        scope: see `namespace_key`; hashed into the first block.
        content: in order of position; each is hashed into the block where it begins.
        values: the hashes so far.
    """

    __slots__ = ("content", "scope", "values")

    def __init__(self, scope: bytes = b"", content: Sequence[ContentKey] = ()) -> None:
        self.scope = scope
        self.content = tuple(content)
        self.values: list[bytes] = []

    def hash_full_blocks(self, token_ids: list[int], block_size: int) -> list[bytes]:
        """Hash the tokens' full blocks that aren't hashed yet; returns all hashes."""
        values = self.values
        for start in range(len(values) * block_size, len(token_ids) - block_size + 1, block_size):
            parent = values[-1] if values else ROOT
            values.append(self._hash_block(parent, token_ids, start, start + block_size))
        return values

    def hash_partial_block(self, token_ids: list[int], block_size: int, end: int) -> bytes:
        """Hash of the block that tokens up to `end` fill partially; earlier blocks are hashed."""
        num_full = end // block_size
        start, parent = num_full * block_size, self.values[num_full - 1] if num_full else ROOT
        block_hash = self._hash_block(parent, token_ids, start, end)
        return hashlib.sha256(b"partial" + block_hash).digest()

    def _hash_block(self, parent: bytes, token_ids: list[int], start: int, end: int) -> bytes:
        """Hash of tokens [start, end) that follow the block `parent`."""
        extra = b""
        if not start or (self.content and self.content[-1].position >= start):
            content = self._started_in(start, end)
            extra = extra_keys(b"" if start else self.scope, content, start)
        return hash_block(parent, token_ids[start:end], extra)

    def copy(self) -> BlockHashes:
        """A copy for a sequence that continues this one's tokens."""
        copy = BlockHashes(self.scope, self.content)
        copy.values = self.values.copy()
        return copy

    def _started_in(self, start: int, end: int) -> Sequence[ContentKey]:
        """Keys of the content that begins at tokens [start, end)."""
        if not self.content:
            return ()
        return self.content[
            bisect_left(self.content, start, key=_position) : bisect_left(
                self.content, end, key=_position
            )
        ]


class CacheableSequence(Protocol):
    """The fields of a sequence that its blocks depend on."""

    @property
    def seq_id(self) -> int: ...

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def block_hashes(self) -> BlockHashes: ...

    @property
    def encoder_key(self) -> bytes: ...

    @property
    def num_encoder_states(self) -> int: ...

    @property
    def lora_name(self) -> str | None: ...


def _position(key: ContentKey) -> int:
    return key.position


def _prefixed(part: bytes) -> bytes:
    """The bytes, prefixed with their length."""
    return len(part).to_bytes(4, "little") + part


# Why no cached prefix was found for a prompt.
#
# Every reason follows from what its own namespace has sent. None reveals that the same tokens are
# cached in another one: a metric of such cases would confirm guesses of anybody who can read it.


CACHING_OFF = "caching_off"
#: Logprobs or pooled vectors of all prompt tokens are requested, so all are computed.
ALL_TOKENS_NEEDED = "all_tokens_needed"
SHORTER_THAN_A_BLOCK = "shorter_than_a_block"
EVICTED = "evicted"
#: Its first blocks are cached, but no state at the end of any of them.
NO_STATE = "no_state"
NO_SHARED_PREFIX = "no_shared_prefix"

_REMEMBERED = 8192


class PrefixMissTracker:
    """Remembers the first blocks of recent prompts that started cold.

    Bounded memory: if a prompt's first block is remembered, it was cached once in this namespace,
    so it has been evicted since. Forgotten ones count as never shared.
    """

    def __init__(self, block_size: int, remembered: int = _REMEMBERED) -> None:
        self._block_size = block_size
        self._remembered = remembered
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def miss_reason(self, token_ids: list[int], hashes: BlockHashes) -> str:
        """Why no prefix was found for a sequence; its first block is remembered from now on.

        Its hashes must be up to date.
        """
        if len(token_ids) <= self._block_size:
            # The last token is always computed, so a prompt of one block can't hit it either.
            return SHORTER_THAN_A_BLOCK
        first = hashes.values[0]
        reason = EVICTED if first in self._hashes else NO_SHARED_PREFIX
        self._hashes[first] = None
        self._hashes.move_to_end(first)
        if len(self._hashes) > self._remembered:
            self._hashes.popitem(last=False)
        return reason
