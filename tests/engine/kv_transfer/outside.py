"""A connector of another package: blocks by their hashes in a dict, saved layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from torch import Tensor

from engine.kv_transfer.base import (
    KVCaches,
    KVConnectorBase,
    KVConnectorMetadata,
    PlanView,
    RequestView,
)


class DictMetadata(KVConnectorMetadata):
    """(hash, block id) of the blocks to load and to save."""

    loads: list[tuple[bytes, int]] = msgspec.field(default_factory=list)
    saves: list[tuple[bytes, int]] = msgspec.field(default_factory=list)


class DictConnector(KVConnectorBase):
    """Knows a block's id from the plan that starts its sequence, so only prompts are saved."""

    metadata_type = DictMetadata

    def __init__(self, vllm_config: Any, role: str, kv_cache_config: Any) -> None:
        self.role = role
        self.block_size = vllm_config.cache_config.block_size
        self.num_layers = kv_cache_config.num_layers
        self.blocks: dict[bytes, dict[str, list[Tensor]]] = {}
        self.loads: list[tuple[bytes, int]] = []
        self.finished: list[int] = []

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        size = self.block_size
        hashes = request.block_hashes.values[: (len(request.token_ids) - 1) // size]
        count = 0
        for block_hash in hashes[num_computed_tokens // size :]:
            if block_hash not in self.blocks:
                break
            count += 1
        return count * size, False

    def update_state_after_alloc(
        self, request: RequestView, block_ids: list[list[int]], num_external_tokens: int
    ) -> None:
        end = request.num_computed_tokens // self.block_size
        first = end - num_external_tokens // self.block_size
        hashes = request.block_hashes.values
        self.loads += zip(hashes[first:end], block_ids[0][first:end], strict=True)

    def build_connector_meta(
        self, plan: PlanView, scheduled: Sequence[RequestView]
    ) -> DictMetadata | None:
        sequences = {sequence.seq_id: sequence for sequence in scheduled}
        saves: list[tuple[bytes, int]] = []
        for new in plan.new:
            sequence = sequences[new.seq_id]
            end = sequence.num_computed_tokens // self.block_size
            saves += zip(sequence.block_hashes.values[:end], new.block_ids[0], strict=False)
        loads, self.loads = self.loads, []
        return DictMetadata(loads, saves) if loads or saves else None

    def request_finished(
        self, request: RequestView, block_ids: list[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.finished.append(request.seq_id)
        return False, None

    def register_kv_caches(self, kv_caches: KVCaches) -> None:
        self.kv_caches = kv_caches

    def start_load_kv(self, forward_context: Any = None, **kwargs: Any) -> None:
        assert isinstance(self._metadata, DictMetadata)
        for block_hash, block_id in self._metadata.loads:
            for name, layer in self.kv_caches.items():
                for tensor, part in zip(layer, self.blocks[block_hash][name], strict=True):
                    tensor[block_id] = part

    def save_kv_layer(
        self, layer_name: str, kv_layer: Sequence[Tensor], attn_metadata: Any = None, **kwargs: Any
    ) -> None:
        assert isinstance(self._metadata, DictMetadata)
        for block_hash, block_id in self._metadata.saves:
            parts = [tensor[block_id].clone() for tensor in kv_layer]
            self.blocks.setdefault(block_hash, {})[layer_name] = parts


class AsyncMetadata(DictMetadata):
    """`receives`: for the requests whose blocks are loaded while steps run, the same."""

    receives: dict[str, list[tuple[bytes, int]]] = msgspec.field(default_factory=dict)


class AsyncConnector(DictConnector):
    """Loads while steps run and sends the blocks of ended requests, both as the test says: see
    `receive` and `send`.
    """

    metadata_type = AsyncMetadata

    def __init__(self, vllm_config: Any, role: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.sends = False
        self.starting: dict[str, list[tuple[bytes, int]]] = {}
        self.receiving: dict[str, list[tuple[bytes, int]]] = {}
        self.sending: dict[str, tuple[list[bytes], list[int]]] = {}
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.failed: set[int] = set()
        self.all_finished: set[str] = set()

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return super().get_num_new_matched_tokens(request, num_computed_tokens)[0], True

    def update_state_after_alloc(
        self, request: RequestView, block_ids: list[list[int]], num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, block_ids, num_external_tokens)
        if num_external_tokens:
            self.starting[request.request_id], self.loads = self.loads, []

    def build_connector_meta(
        self, plan: PlanView, scheduled: Sequence[RequestView]
    ) -> AsyncMetadata | None:
        metadata = super().build_connector_meta(plan, scheduled)
        saves = metadata.saves if metadata else []
        starting, self.starting = self.starting, {}
        return AsyncMetadata([], saves, starting) if saves or starting else None

    def start_load_kv(self, forward_context: Any = None, **kwargs: Any) -> None:
        assert isinstance(self._metadata, AsyncMetadata)
        self.receiving.update(self._metadata.receives)

    def receive(self, num_lost: int = 0) -> None:
        """Load all that was begun, but the last `num_lost` blocks of each request."""
        for request_id, loads in list(self.receiving.items()):
            del self.receiving[request_id]
            end = len(loads) - num_lost
            for block_hash, block_id in loads[:end]:
                for name, layer in self.kv_caches.items():
                    for tensor, part in zip(layer, self.blocks[block_hash][name], strict=True):
                        tensor[block_id] = part
            self.failed.update(block_id for _, block_id in loads[end:])
            self.received.add(request_id)

    def request_finished(
        self, request: RequestView, block_ids: list[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        super().request_finished(request, block_ids)
        if not self.sends:
            return False, None
        self.sending[request.request_id] = (request.block_hashes.values, block_ids[0])
        return True, {"remote_port": 5600}

    def send(self) -> None:
        """Read the kept blocks: they must hold what was saved when they were computed."""
        for request_id, (hashes, block_ids) in self.sending.items():
            for block_hash, block_id in zip(hashes, block_ids, strict=False):
                for name, layer in self.kv_caches.items():
                    if block_hash in self.blocks:
                        for tensor, part in zip(layer, self.blocks[block_hash][name], strict=True):
                            assert tensor[block_id].equal(part)
            self.sent.add(request_id)
        self.sending.clear()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        self.all_finished |= finished_req_ids
        sent, received, self.sent, self.received = self.sent, self.received, set(), set()
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self.failed = self.failed, set()
        return failed


class NoConnector:
    """Isn't one."""
