"""`RankConnector`: the part of another rank than the first in saving and loading KV blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.kv_cache import KVCacheConfig
from engine.kv_transfer.base import (
    KVCaches,
    KVConnectorBase,
    KVConnectorMetadata,
    PlanView,
    RequestView,
)
from engine.kv_transfer.block_buffers import BlockBuffers
from engine.kv_transfer.host_tier import HostTier
from engine.kv_transfer.offloading_metadata import OffloadingMetadata, PlannedBlock

#: The first rank bounds the tier, into which as many blocks fit as here.
_UNBOUNDED = 1 << 62


class RankConnector(KVConnectorBase):
    """Keeps this rank's part of the blocks that the first rank's tier in host memory has.

    The first rank alone finds blocks and evicts them, and says so in its plans: two tiers of the
    same size would differ, because blocks are looked up while a step runs. Plans come later than
    what they say, so that there are more blocks here at times, and never fewer.
    """

    metadata_type = OffloadingMetadata

    def __init__(self, capacity: int, layout: KVCacheConfig) -> None:
        """`capacity`: bytes of as many blocks as the first rank's tier has room for."""
        self.host = HostTier(_UNBOUNDED)
        self._capacity, self._layout = capacity, layout
        #: By key the last step that was to save it.
        self._saved_in: dict[bytes, int] = {}

    def register_kv_caches(self, kv_caches: KVCaches) -> None:
        self._buffers = BlockBuffers(kv_caches, self._layout)

    def start_load_kv(self, forward_context: Any = None, **kwargs: Any) -> None:
        metadata = self._metadata
        if not isinstance(metadata, OffloadingMetadata):
            return
        for _, _, blocks in metadata.swapped:
            self._save(blocks, metadata.step)
        for group, block_id, keys in metadata.loads:
            payloads = [self.host.get(key) for key in keys]
            if any(payload is None for payload in payloads):
                raise LookupError(f"block {block_id} isn't in host memory as it was saved")
            self._buffers.write(group, block_id, [p for p in payloads if p is not None])
        for step, key in metadata.removed:
            # One that was saved again since then is in the first rank's tier.
            if self._saved_in.get(key, step) <= step:
                self.host.remove(key)
                self._saved_in.pop(key, None)

    def wait_for_save(self) -> None:
        metadata = self._metadata
        if isinstance(metadata, OffloadingMetadata):
            for _, _, blocks in metadata.saves:
                self._save(blocks, metadata.step)

    def _save(self, blocks: Sequence[PlannedBlock], step: int) -> None:
        for group, block_id, keys in blocks[: self._capacity // self._buffers.block_bytes]:
            if not all(key in self.host for key in keys):
                payloads = self._buffers.read(group, block_id)
                self.host.put(list(zip(keys, payloads, strict=True)), "")
            self._saved_in.update(dict.fromkeys(keys, step))

    def reset_cache(self) -> None:
        self.host.clear()
        self._saved_in.clear()

    def shutdown(self) -> None:
        self.reset_cache()

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False  # the first rank decides

    def update_state_after_alloc(
        self, request: RequestView, block_ids: list[list[int]], num_external_tokens: int
    ) -> None:
        """Do nothing: only the first rank needs this."""

    def build_connector_meta(
        self, plan: PlanView, scheduled: Sequence[RequestView]
    ) -> KVConnectorMetadata | None:
        return None
