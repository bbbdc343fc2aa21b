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
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

#: Whether block `index` of the prompt is cached for the group with this key suffix.
IsCached = Callable[[int, bytes], bool]


@dataclass(frozen=True, slots=True)
class HitRequirement:
    """Groups that attend alike.

    Attributes:
        num_required_blocks: blocks before a block's first token that this token sees; None: all of
        them.
        suffixes: key suffixes of the groups; a block is a hit when it's cached in each of them.
    """

    num_required_blocks: int | None
    suffixes: tuple[bytes, ...]


def longest_common_hit(types: list[HitRequirement], max_blocks: int, cached: IsCached) -> int:
    """Blocks of the longest prefix, at most `most`, that is a hit in every attention type.

    Full attention needs all blocks of the prefix and is searched from the left; it goes first. A
    window needs only the last blocks and is searched from the right, within what the others left.
    What shortens one type's hit may spoil another window's, so the windows go round until they
    agree; a shorter prefix is always a hit in full attention too.
    """
    hit = max_blocks
    while True:
        previous_hit = hit
        for kind in types:
            if kind.num_required_blocks is not None:
                hit = _last_window_hit(kind, kind.num_required_blocks, hit, cached)
            elif hit == max_blocks:
                hit = _first_missing_block(kind, hit, cached)
        if (
            hit == previous_hit
            or len(types) < 2
            or (len(types) == 2 and types[0].num_required_blocks is None)
        ):
            return hit


def _first_missing_block(kind: HitRequirement, max_blocks: int, cached: IsCached) -> int:
    """How many of the first blocks are cached."""
    for index in range(max_blocks):
        if not all(cached(index, suffix) for suffix in kind.suffixes):
            return index
    return max_blocks


def _last_window_hit(kind: HitRequirement, reach: int, max_blocks: int, cached: IsCached) -> int:
    """The largest end <= most such that the `reach` blocks before it are cached (or all, if fewer).

    A miss rules out every window that holds it. So windows are scanned from their left, and one
    miss usually moves the search by a whole window: a cold prompt costs one look-up a window.
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


#: The parent of first blocks; as long as any other, so that tokens never take its place.
ROOT = bytes(32)


class ContentKey(NamedTuple):
    """What stands in a prompt from one of its tokens on and can't be told from token ids."""

    #: The first token that depends on it.
    position: int
    #: sha256 of the content, whole.
    digest: bytes


def namespace_key(namespace: str, adapter: str = "") -> bytes:
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
        extra: see `extra_keys`.
    """
    digest = hashlib.sha256(parent)
    digest.update(array("i", token_ids).tobytes())
    if extra:
        digest.update(extra)
    return digest.digest()


def extra_keys(scope: bytes, content: Sequence[ContentKey], start: int) -> bytes:
    """What the keys that begin in a block add to its hash; empty when none does.

    `start`: the block's first token, from which positions are counted.
    """
    if not scope and not content:
        return b""
    keys = [(position - start).to_bytes(4, "little") + _prefixed(key) for position, key in content]
    return b"".join([_prefixed(scope), *keys])


def group_key(group: int) -> bytes:
    """What a KV cache group adds to a block's hash to make its key in the pool."""
    return group.to_bytes(2, "little")


class BlockHashes:
    """The hashes of one sequence's full blocks, made as they're asked for.

    They depend on tokens alone, so they survive a preemption.

    Attributes:
        scope: see `namespace_key`; told in the first block.
        content: in order of position; each is told in the block where it begins.
        values: the hashes so far.
    """

    __slots__ = ("content", "scope", "values")

    def __init__(self, scope: bytes = b"", content: Sequence[ContentKey] = ()) -> None:
        self.scope = scope
        self.content = tuple(content)
        self.values: list[bytes] = []

    def hash_full_blocks(self, token_ids: list[int], block_size: int) -> list[bytes]:
        """Hash those of the tokens' full blocks that aren't hashed yet; all hashes."""
        values = self.values
        for start in range(len(values) * block_size, len(token_ids) - block_size + 1, block_size):
            parent = values[-1] if values else ROOT
            values.append(self._hash_block(parent, token_ids, start, start + block_size))
        return values

    def hash_partial_block(self, token_ids: list[int], block_size: int, end: int) -> bytes:
        """Hash of the block that tokens up to `end` fill in part; those before it are hashed."""
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
        """The same for a sequence that goes on from this one's tokens."""
        copy = BlockHashes(self.scope, self.content)
        copy.values = self.values.copy()
        return copy

    def _started_in(self, start: int, end: int) -> Sequence[ContentKey]:
        """Keys of what begins at tokens [start, end)."""
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
    def lora_name(self) -> str | None: ...


def _position(key: ContentKey) -> int:
    return key.position


def _prefixed(part: bytes) -> bytes:
    """Bytes with their length before them."""
    return len(part).to_bytes(4, "little") + part


# Why a prompt found nothing in the cache.
#
# Every reason follows from what its own namespace has sent. None tells that the same tokens are
# known in another one: a number that counts such cases answers the guesses of whoever can read it.


CACHING_OFF = "caching_off"
#: Logprobs or pooled vectors of all prompt tokens are wanted, so all are computed.
ALL_TOKENS_NEEDED = "all_tokens_needed"
SHORTER_THAN_A_BLOCK = "shorter_than_a_block"
EVICTED = "evicted"
#: Its first blocks are cached, but no state at the end of any of them.
NO_STATE = "no_state"
NO_SHARED_PREFIX = "no_shared_prefix"

_REMEMBERED = 8192


class PrefixMissTracker:
    """Remembers the first blocks of the last prompts that started cold.

    Bounded memory: a prompt whose first block is remembered was cached once in this namespace, so
    it has been evicted since. What was forgotten counts as never shared.
    """

    def __init__(self, block_size: int, remembered: int = _REMEMBERED) -> None:
        self._block_size = block_size
        self._remembered = remembered
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def miss_reason(self, token_ids: list[int], hashes: BlockHashes) -> str:
        """Why nothing was found for a sequence; its first block is remembered from now on.

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
