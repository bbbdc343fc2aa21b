"""One KV block: a fixed number of token slots in every layer's cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.kv_cache.accounts import Account


class Block:
    """Bookkeeping of one block. All blocks are made once, when the pool is.

    The free-list pointers live in the block itself, so that taking one out of the middle of the
    list (a cache hit on a free block) is O(1) and allocates nothing.
    """

    __slots__ = (
        "block_hash",
        "block_id",
        "guests",
        "next_free",
        "owner",
        "prev_free",
        "ref_count",
    )

    def __init__(self, block_id: int) -> None:
        #: Index into the KV cache tensors; never changes.
        self.block_id = block_id
        #: How many sequences' block tables hold this block.
        self.ref_count = 0
        #: Hash of this block's tokens and all before them, once it is full; None when not cached.
        self.block_hash: bytes | None = None
        #: The tenant that it's charged to; of a free block, the one that used it last.
        self.owner: Account | None = None
        #: How often tenants other than the owner use it; None, as nearly always: not at all.
        self.guests: dict[Account, int] | None = None
        self.prev_free: Block | None = None
        self.next_free: Block | None = None

    @property
    def is_free(self) -> bool:
        """Whether the block is in the free list (a free block may still be cached)."""
        return self.next_free is not None

    def __repr__(self) -> str:
        cached = self.block_hash.hex()[:8] if self.block_hash else "-"
        return f"Block({self.block_id}, refs={self.ref_count}, hash={cached})"


#: Stands in a block table where the sequence needs no block. Its id is one that kernels take for
#: valid; they never read it, because what is there lies out of the layer's window.
NULL_BLOCK = Block(0)
