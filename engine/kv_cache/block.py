"""KV blocks, the lists of free ones, and the tenants that they are charged to.

These classes share a module because they refer to each other: a block to its owner, an owner to
its free blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator


class Block:
    """Metadata of one block, a fixed number of token slots in every layer's cache.

    All blocks are created once, with the pool. The free-list pointers are fields of the block, so
    that removing one from the middle of the list (a cache hit on a free block) is O(1) and
    allocates nothing.
    """

    __slots__ = (
        "block_hash",
        "block_id",
        "charged_to",
        "next_free",
        "prev_free",
        "ref_count",
        "sharers",
    )

    def __init__(self, block_id: int) -> None:
        #: Index into the KV cache tensors; never changes.
        self.block_id = block_id
        #: Number of sequences whose block tables hold this block.
        self.ref_count = 0
        #: Hash of this block's tokens and all before them, once it is full; None when not cached.
        self.block_hash: bytes | None = None
        #: The tenant that it's charged to; for a free block, the one that used it last.
        self.charged_to: TenantQuota | None = None
        #: Number of uses by tenants other than the owner; None, as nearly always: none.
        self.sharers: dict[TenantQuota, int] | None = None
        self.prev_free: Block | None = None
        self.next_free: Block | None = None

    def __repr__(self) -> str:
        cached = self.block_hash.hex()[:8] if self.block_hash else "-"
        return f"Block({self.block_id}, refs={self.ref_count}, hash={cached})"


#: Fills a block table where the sequence needs no block. Kernels accept its id as valid, but never
#: read it, because its tokens are outside the layer's window.
NULL_BLOCK = Block(0)


class FreeBlockQueue:
    """Blocks that no sequence uses, least recently used first. Every operation is O(1) per block.

    Sentinels at both ends avoid special cases.
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._head = Block(-1)
        self._tail = Block(-2)
        self._head.next_free = self._tail
        self._tail.prev_free = self._head
        self.count = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Block]:
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free

    def append(self, block: Block) -> None:
        """Append a block at the tail: it is evicted last."""
        last = self._tail.prev_free
        if last is None or block.next_free is not None:
            raise RuntimeError(f"{block} is already in the free list.")
        last.next_free = block
        block.prev_free = last
        block.next_free = self._tail
        self._tail.prev_free = block
        self.count += 1

    def prepend(self, block: Block) -> None:
        """Insert a block at the head: it is evicted first."""
        first = self._head.next_free
        if first is None or block.next_free is not None:
            raise RuntimeError(f"{block} is already in the free list.")
        first.prev_free = block
        block.next_free = first
        block.prev_free = self._head
        self._head.next_free = block
        self.count += 1

    def remove(self, block: Block) -> None:
        """Remove a block from any position."""
        previous, after = block.prev_free, block.next_free
        if previous is None or after is None:
            raise RuntimeError(f"{block} is not in the free list.")
        previous.next_free = after
        after.prev_free = previous
        block.prev_free = block.next_free = None
        self.count -= 1

    def pop(self, count: int) -> list[Block]:
        """Pop the least recently used blocks. Raises IndexError if there are fewer."""
        if count > self.count:
            raise IndexError(f"{count} blocks wanted, {self.count} are in the free list.")
        blocks: list[Block] = []
        block = self._head.next_free
        while block is not None and len(blocks) < count:
            blocks.append(block)
            after = block.next_free
            block.prev_free = block.next_free = None
            block = after
        self._head.next_free = block
        if block is not None:
            block.prev_free = self._head
        self.count -= count
        return blocks


class TenantQuota:
    """One tenant's blocks. Limits are in blocks."""

    __slots__ = (
        "free",
        "maximum",
        "name",
        "reserved",
        "running",
        "seen_at",
        "sequences",
        "superfluous",
        "unreturned",
        "used",
        "weight",
    )

    def __init__(self, name: str, num_blocks: int) -> None:
        self.name = name
        #: Number of blocks in use that are charged to the tenant.
        self.used = 0
        #: Free blocks that it used last, least recently used first; many are still cached.
        self.free = FreeBlockQueue(())
        #: Blocks with their hashes that are evicted before other cached ones, the next one first,
        #: see `StateManager`; outdated ones are dropped when they surface or are overwritten.
        self.superfluous: OrderedDict[Block, bytes] = OrderedDict()
        #: Likewise those that no prompt has returned to, the least recently used one first.
        self.unreturned: OrderedDict[Block, bytes] = OrderedDict()
        #: Number of its sequences, waiting and running, and of the running ones.
        self.sequences = 0
        self.running = 0
        self.weight = 1.0
        #: Number of blocks that other tenants' allocations must leave to it.
        self.reserved = 0
        #: Maximum number of blocks that it may use.
        self.maximum = num_blocks
        self.seen_at = 0.0

    @property
    def unused_reserve(self) -> int:
        """Number of reserved blocks that it doesn't use."""
        return max(0, self.reserved - self.used)

    def __repr__(self) -> str:
        return f"TenantQuota({self.name!r}, used={self.used}, free={self.free.count})"
