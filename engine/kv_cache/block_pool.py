"""The pool of all KV blocks: who uses which, which are cached, which go next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.kv_cache.block import NULL_BLOCK, Block
from engine.kv_cache.free_list import FreeList


class BlockPool:
    """All blocks of a replica.

    Every block is either used (`ref_count > 0`) or in the free list. A full block may also be
    cached under its hash, used or free; a free cached block is evicted when it is taken again.
    Two blocks may hold the same content (block tables are append-only, so a duplicate isn't
    replaced); a hash then maps to several blocks.
    """

    def __init__(self, num_blocks: int, enable_caching: bool = True) -> None:
        if num_blocks < 1:
            raise ValueError(f"A pool needs at least one block, got {num_blocks}.")
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.free_list = FreeList(self.blocks)
        self.enable_caching = enable_caching
        # Nearly every hash has one block: it's stored bare, a dict only for duplicates.
        self._cached: dict[bytes, Block | dict[int, Block]] = {}
        #: Blocks that a prefix could hit.
        self.num_cached = 0

    @property
    def num_blocks(self) -> int:
        """All blocks, used and free."""
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return self.free_list.count

    @property
    def usage(self) -> float:
        """Share of blocks in use, in [0, 1]."""
        return 1.0 - self.num_free / self.num_blocks

    def lookup(self, block_hash: bytes) -> Block | None:
        """A block with this content, or None."""
        found = self._cached.get(block_hash)
        if isinstance(found, dict):
            return next(iter(found.values()))
        return found

    def allocate(self, count: int) -> list[Block]:
        """Take `count` blocks from the head of the free list, evicting what they cached.

        Raises RuntimeError when fewer are free: callers ask `num_free` first.
        """
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks asked for, {self.num_free} are free.")
        taken = []
        for _ in range(count):
            block = self.free_list.pop()
            if block.block_hash is not None:
                self.uncache(block)
            block.ref_count = 1
            taken.append(block)
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        """One more sequence uses these cached blocks; free ones leave the free list."""
        for block in blocks:
            if block.ref_count == 0:
                self.free_list.remove(block)
            block.ref_count += 1

    def free(self, blocks: Sequence[Block]) -> None:
        """One sequence stops using these blocks, given in block-table order.

        They are freed in reverse: the last block covers the longest prefix and is the least likely
        to be hit again, so it is to be evicted first.
        """
        for block in reversed(blocks):
            block.ref_count -= 1
            if block.ref_count == 0:
                self.free_list.append(block)

    def cache(self, block: Block, block_hash: bytes) -> None:
        """Make a full block findable by its hash."""
        if not self.enable_caching:
            return
        if block.block_hash is not None:
            raise RuntimeError(f"{block} is already cached.")
        block.block_hash = block_hash
        self.num_cached += 1
        found = self._cached.get(block_hash)
        if found is None:
            self._cached[block_hash] = block
        elif isinstance(found, dict):
            found[block.block_id] = block
        else:
            self._cached[block_hash] = {found.block_id: found, block.block_id: block}

    def uncache(self, block: Block) -> None:
        """Forget a block's content."""
        block_hash = block.block_hash
        if block_hash is None:
            return
        block.block_hash = None
        self.num_cached -= 1
        found = self._cached[block_hash]
        if isinstance(found, dict):
            del found[block.block_id]
            if len(found) == 1:
                self._cached[block_hash] = next(iter(found.values()))
        else:
            del self._cached[block_hash]

    def uncache_all(self, block_hash: bytes) -> None:
        """Forget all blocks with this content."""
        while (block := self.lookup(block_hash)) is not None:
            self.uncache(block)

    def reset_cache(self) -> bool:
        """Forget all cached content; False, and nothing done, while any block is in use."""
        if self.num_free != self.num_blocks:
            return False
        for block in self.blocks:
            block.block_hash = None
        self._cached.clear()
        self.num_cached = 0
        return True

    def check_integrity(self, tables: Iterable[Sequence[Block]] = ()) -> None:
        """Raise RuntimeError unless free + used = all and no count is off.

        Args:
            tables: the block tables of all live sequences; reference counts must equal their use.
        """
        free_ids = [block.block_id for block in self.free_list]
        if len(free_ids) != len(set(free_ids)) or len(free_ids) != self.num_free:
            raise RuntimeError("The free list holds a block twice, or its count is off.")
        uses = [0] * self.num_blocks
        for table in tables:
            for block in table:
                if block is not NULL_BLOCK:
                    uses[block.block_id] += 1
        free = set(free_ids)
        for block in self.blocks:
            if block.ref_count != uses[block.block_id]:
                raise RuntimeError(f"{block} is in {uses[block.block_id]} block tables.")
            if (block.block_id in free) != (block.ref_count == 0):
                raise RuntimeError(f"{block} is free and used at once, or neither.")
            if block.block_hash is not None and not self._holds(block):
                raise RuntimeError(f"{block} is cached, but its hash does not lead to it.")
        entries = sum(len(v) if isinstance(v, dict) else 1 for v in self._cached.values())
        cached = sum(block.block_hash is not None for block in self.blocks)
        if not entries == cached == self.num_cached:
            raise RuntimeError(f"{entries} cache entries for {cached} cached blocks.")

    def _holds(self, block: Block) -> bool:
        """Whether the block's own hash leads back to it."""
        found = self._cached.get(block.block_hash or b"")
        return block.block_id in found if isinstance(found, dict) else found is block
