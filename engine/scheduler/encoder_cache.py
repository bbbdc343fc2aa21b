"""`EncoderCacheManager`: which encoder outputs the worker keeps, and when they are computed.

A picture is encoded once for all sequences of its tenant that need it (after vLLM's
`EncoderCacheManager`). Sequences refer to an output until the tokens that it stands for are in the
KV cache; an output without references stays until its memory is needed. The tenant that uses the
most memory loses its least recently used output first.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

from engine.contract.messages import EngineRequest, MediaItem
from engine.multimodal.pruning import retained_cells
from engine.scheduler.plan import EncoderInput, EncodeTask

#: Maximum number of vectors of a picture, where the context allows it: twice what Qwen's processor
#: produces by default. In a model of width 3,584 they take 450 MiB.
_MAX_PICTURE_VECTORS = 32_768


@dataclass(slots=True, frozen=True)
class EncoderItem:
    """A picture of a request.

    Attributes:
        item: its position in the prompt.
        key: sha256 of its digest and its tenant's cache namespace, so that tenants never share
            encoder outputs.
        handle: the encoder's input, see `Executor.attach`.
        bidirectional: see `EncoderInput`.
        tenant, cache_namespace: the request's.
        adapter: see `EncodeTask`.
        num_states: number of states of which the KV cache keeps keys and values; 0: it keeps none.
    """

    item: MediaItem
    key: bytes
    handle: int
    bidirectional: bool = False
    tenant: str = ""
    cache_namespace: str = ""
    adapter: str = ""
    num_states: int = 0

    def with_adapter(self, digest: str) -> EncoderItem:
        """The same item, encoded with an adapter."""
        key = hashlib.sha256(self.key + bytes.fromhex(digest)).digest()
        return replace(self, key=key, adapter=digest)

    @property
    def inputs(self) -> list[EncoderInput]:
        """The prompt tokens that its vectors stand for."""
        inputs, offset = [], 0
        item = self.item
        retained = retained_cells(item.retained, item.grid) if item.retained and item.grid else []
        for index, (start, count) in enumerate(item.ranges):
            inputs.append(
                EncoderInput(
                    start,
                    count,
                    key=self.key,
                    offset=offset,
                    grid=item.grid,
                    time_interval=item.time_interval,
                    bidirectional=self.bidirectional,
                    retained=retained[index].tobytes() if retained else b"",
                )
            )
            offset += count
        return inputs


def encoder_capacity(token_budget: int, max_model_len: int) -> int:
    """Number of vectors that a worker keeps, whose steps have at most `token_budget` tokens."""
    return max(4 * token_budget, min(max_model_len, _MAX_PICTURE_VECTORS))


def encoder_key(message: EngineRequest, item: MediaItem) -> bytes:
    """Key of an item's encoder output."""
    namespace = hashlib.sha256(message.cache_namespace.encode()).digest()
    return hashlib.sha256(namespace + item.digest).digest()


def _needed(items: Items[EncoderItem], start: int, count: int) -> dict[bytes, EncoderItem]:
    """Items by key of which a vector stands for one of the tokens [start, start + count), each
    at its first occurrence.
    """
    needed: dict[bytes, EncoderItem] = {}
    for entry in items:
        if entry.item.start < start + count and entry.item.end > start:
            needed.setdefault(entry.key, entry)
    return needed


def _end_outside_spans(items: Items[EncoderItem], start: int, end: int) -> int:
    """Where a chunk [start, end) may end: never within tokens that attend to each other. It is
    shortened to end before them, or extended over them if it begins at or within them.
    """
    for entry in items:
        for first, count in entry.item.ranges if entry.bidirectional else ():
            if first < end < first + count:
                return first if first > start else first + count
    return end


@dataclass(slots=True)
class _Entry:
    num_vectors: int
    tenant: str = ""
    #: Ids of the sequences that still need it.
    users: set[int] = field(default_factory=set)


class EncoderCacheManager:
    """Accounting of the encoder outputs that the worker keeps.

    Args:
        capacity: number of vectors that the worker keeps; at least as many as the largest item has.
        max_step_vectors: vectors that one step may compute, unless its first item has more. It
            limits how long decodes wait for pictures.
    """

    def __init__(self, capacity: int, max_step_vectors: int) -> None:
        self.capacity, self._max_step_vectors = capacity, max_step_vectors
        #: Least recently used first.
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        #: Number of vectors that the worker keeps.
        self.num_vectors = 0
        self._keys_of: dict[int, set[bytes]] = {}
        self._dropped: list[bytes] = []
        #: Number of vectors that the step being planned computes.
        self.num_step_vectors = 0
        #: Number of cache hits, and of lookups.
        self.num_hits = self.num_queries = 0

    def start_step(self) -> None:
        """Begin planning a step."""
        self.num_step_vectors = 0

    def fits_step(self, num_vectors: int) -> bool:
        """Whether the step being planned can compute `count` more vectors."""
        total = self.num_step_vectors + num_vectors
        return total <= self._max_step_vectors or not self.num_step_vectors

    def charge_step(self, num_vectors: int) -> None:
        """Count vectors that the step computes but the worker doesn't keep."""
        self.num_step_vectors += num_vectors

    def limit_tokens(
        self, items: Items[EncoderItem], start: int, count: int, max_vectors: int | None = None
    ) -> int:
        """Number of a sequence's next `count` tokens, from `start` on, that this step can compute.

        They end before the first item that exceeds the step's encoder budget, or `max_vectors`
        unless it is the step's first. The result may exceed
        `count` where tokens that attend to each other can't be split.
        """
        if count <= 0:
            return 0
        count = _end_outside_spans(items, start, start + count) - start
        needed = _needed(items, start, count)
        unused = sum(
            cached.num_vectors
            for key, cached in self._entries.items()
            if key not in needed and not cached.users
        )
        new_vectors = 0
        for key, entry in needed.items():
            if key in self._entries:
                continue
            new_vectors += entry.item.num_vectors
            is_first = new_vectors == entry.item.num_vectors and not self.num_step_vectors
            affordable = self.num_step_vectors + new_vectors <= self._max_step_vectors
            affordable &= max_vectors is None or new_vectors <= max_vectors
            fits = self.num_vectors - unused + new_vectors <= self.capacity
            if not fits or not (affordable or is_first):
                return max(0, entry.item.start - start)
        return count

    def schedule(
        self, seq_id: int, items: Items[EncoderItem], start: int, count: int
    ) -> list[EncodeTask]:
        """Refer to the items of a sequence's next `count` tokens, as `limit_tokens` allowed them,
        and release those of earlier tokens. Returns the tasks to encode in this step.
        """
        for entry in items:
            if entry.item.end <= start:
                self._release_one(seq_id, entry.key)
        needed = _needed(items, start, count)
        for key in needed:
            if (cached := self._entries.get(key)) is not None:
                self.num_hits += seq_id not in cached.users
                self.num_queries += seq_id not in cached.users
                self._refer(seq_id, key)
        tasks: list[EncodeTask] = []
        for key, entry in needed.items():
            if key not in self._entries:
                self.num_queries += 1
                self._insert(key, entry)
                self._refer(seq_id, key)
                tasks.append(
                    EncodeTask(
                        key,
                        entry.item.kind,
                        entry.handle,
                        tenant=entry.tenant,
                        cache_namespace=entry.cache_namespace,
                        adapter=entry.adapter,
                    )
                )
        return tasks

    def _refer(self, seq_id: int, key: bytes) -> None:
        self._entries.move_to_end(key)
        self._entries[key].users.add(seq_id)
        self._keys_of.setdefault(seq_id, set()).add(key)

    def _insert(self, key: bytes, item: EncoderItem) -> None:
        """Add an entry, evicting unreferenced ones until it fits."""
        size = item.item.num_vectors
        while self.num_vectors + size > self.capacity and (unused := self._victim()) is not None:
            self._drop(unused)
        self._entries[key] = _Entry(size, item.tenant)
        self.num_vectors += size
        self.num_step_vectors += size

    def _victim(self) -> bytes | None:
        """The least recently used unreferenced output of the tenant that uses the most memory."""
        sizes = Counter[str]()
        for entry in self._entries.values():
            sizes[entry.tenant] += entry.num_vectors
        unused = [(key, entry) for key, entry in self._entries.items() if not entry.users]
        return max(unused, key=lambda pair: sizes[pair[1].tenant])[0] if unused else None

    def _drop(self, key: bytes) -> None:
        self.num_vectors -= self._entries.pop(key).num_vectors
        self._dropped.append(key)

    def _release_one(self, seq_id: int, key: bytes) -> None:
        keys = self._keys_of.get(seq_id)
        if keys is None or key not in keys:
            return
        keys.discard(key)
        self._entries[key].users.discard(seq_id)
        if not keys:
            del self._keys_of[seq_id]

    def release(self, seq_id: int) -> None:
        """Release all items of a sequence that ended or was preempted."""
        for key in self._keys_of.pop(seq_id, ()):
            self._entries[key].users.discard(seq_id)

    def forget(self, tasks: Items[EncodeTask]) -> None:
        """Forget items whose step failed: the worker may not have them."""
        for task in tasks:
            if task.key in self._entries:
                for seq_id in self._entries[task.key].users:
                    self._keys_of[seq_id].discard(task.key)
                self._drop(task.key)

    def drop_unused(self) -> bool:
        """Drop all unreferenced outputs. Returns whether none remain."""
        for key in [key for key, entry in self._entries.items() if not entry.users]:
            self._drop(key)
        return not self._entries

    def reset(self) -> None:
        """Drop all outputs; nothing may be running."""
        for key in list(self._entries):
            self._drop(key)
        self._keys_of.clear()

    def pop_dropped(self) -> list[bytes]:
        """Keys of outputs dropped since the last call, for the worker to free."""
        # If one is encoded again in the same step, the worker replaces it.
        dropped, self._dropped = self._dropped, []
        return dropped

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the accounting is consistent."""
        if self.num_vectors != sum(entry.num_vectors for entry in self._entries.values()):
            raise RuntimeError("The encoder cache's number of vectors is off.")
        users = {(seq_id, key) for key, entry in self._entries.items() for seq_id in entry.users}
        if users != {(seq_id, key) for seq_id, keys in self._keys_of.items() for key in keys}:
            raise RuntimeError("The encoder cache's references are off.")
