"""The free list: an intrusive doubly linked list in eviction order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine.kv_cache.block import Block


class FreeList:
    """Blocks that no sequence uses, least recently used first. Every operation is O(1) a block.

    Two sentinels stand at the ends, so that no operation has a special case.
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
        """Put a block at the tail: it will be evicted last."""
        last = self._tail.prev_free
        if last is None or block.next_free is not None:
            raise RuntimeError(f"{block} is already in the free list.")
        last.next_free = block
        block.prev_free = last
        block.next_free = self._tail
        self._tail.prev_free = block
        self.count += 1

    def remove(self, block: Block) -> None:
        """Take a block out from wherever it stands."""
        before, after = block.prev_free, block.next_free
        if before is None or after is None:
            raise RuntimeError(f"{block} is not in the free list.")
        before.next_free = after
        after.prev_free = before
        block.prev_free = block.next_free = None
        self.count -= 1

    def pop(self) -> Block:
        """Take the head, the least recently used block. Raises IndexError when empty."""
        block = self._head.next_free
        if block is None or block is self._tail:
            raise IndexError("The free list is empty.")
        self.remove(block)
        return block
