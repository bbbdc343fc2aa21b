"""`MultiConnector`: several KV connectors as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
from torch import Tensor

from engine.contract.replica_state import EngineStats
from engine.kv_transfer.base import (
    KVCaches,
    KVConnectorBase,
    KVConnectorMetadata,
    KVLoadError,
    PlanView,
    RequestView,
)
from engine.kv_transfer.offloading_connector import OffloadingConnector
from engine.kv_transfer.storage_queue import all_done

_TOTALS = (
    "num_requests_swapped",
    "external_prefix_cache_queries_total",
    "external_prefix_cache_hits_total",
    "kv_tier_saved_blocks_total",
)
_BY_TIER = (
    "kv_tier_failures_total",
    "kv_tier_bytes",
    "kv_tier_capacity_bytes",
    "kv_tier_hit_tokens_total",
    "kv_tier_evicted_tokens_total",
    "kv_tier_saved_seconds_total",
)


class MultiMetadata(KVConnectorMetadata):
    """Attributes: parts: the connectors' metadata as MessagePack; b"" of those without any."""

    parts: list[bytes]


class MultiConnector(KVConnectorBase):
    """All connectors save; a sequence's blocks are loaded by the first that has any of them.

    Attributes:
        connectors: in the order in which they are asked.
    """

    metadata_type = MultiMetadata

    def __init__(self, connectors: Sequence[KVConnectorBase]) -> None:
        self.connectors = list(connectors)
        #: By sequence that is about to start, the connector that loads its blocks.
        self._loaders: dict[int, KVConnectorBase] = {}
        #: By id of a request that has ended, the number of connectors that still send its blocks.
        self._num_sending: dict[str, int] = {}
        #: Those with a part in the step.
        self._bound: list[KVConnectorBase] = []

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._loaders.pop(request.seq_id, None)
        for connector in self.connectors:
            num_tokens, is_async = connector.get_num_new_matched_tokens(
                request, num_computed_tokens
            )
            if num_tokens is None:
                return None, False
            if num_tokens:
                self._loaders[request.seq_id] = connector
                return num_tokens, is_async
        return 0, False

    def start_read_ahead(
        self, request: RequestView, num_computed_tokens: int, needs_encoding: bool = False
    ) -> Future[None] | None:
        arguments = (request, num_computed_tokens, needs_encoding)
        readings = [
            reading
            for connector in self.connectors
            if (reading := connector.start_read_ahead(*arguments)) is not None
        ]
        return all_done(readings) if readings else None

    def follow_prefill(self, request: RequestView, num_computed_tokens: int) -> None:
        for connector in self.connectors:
            connector.follow_prefill(request, num_computed_tokens)

    def stop_following(self, request_id: str) -> None:
        for connector in self.connectors:
            connector.stop_following(request_id)

    def load_encoder_states(self, request: RequestView, block_ids: list[list[int]]) -> bool:
        return any(
            connector.load_encoder_states(request, block_ids) for connector in self.connectors
        )

    def update_state_after_alloc(
        self, request: RequestView, block_ids: list[list[int]], num_external_tokens: int
    ) -> None:
        loader = self._loaders.pop(request.seq_id, None)
        for connector in self.connectors:
            num_tokens = num_external_tokens if connector is loader else 0
            connector.update_state_after_alloc(request, block_ids, num_tokens)

    def build_connector_meta(
        self, plan: PlanView, scheduled: Sequence[RequestView]
    ) -> MultiMetadata | None:
        parts = [
            b"" if metadata is None else msgspec.msgpack.encode(metadata)
            for metadata in (
                connector.build_connector_meta(plan, scheduled) for connector in self.connectors
            )
        ]
        return MultiMetadata(parts) if any(parts) else None

    def request_preempted(self, request: RequestView, block_ids: list[list[int]]) -> None:
        for connector in self.connectors:
            connector.request_preempted(request, block_ids)

    def request_finished(
        self, request: RequestView, block_ids: list[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._loaders.pop(request.seq_id, None)
        results = [connector.request_finished(request, block_ids) for connector in self.connectors]
        if num_sending := sum(delays for delays, _ in results):
            self._num_sending[request.request_id] = num_sending
        return num_sending > 0, next((params for _, params in results if params), None)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        all_sent: set[str] = set()
        all_received: set[str] = set()
        for connector in self.connectors:
            sent, received = connector.get_finished(finished_req_ids)
            all_received.update(received or ())
            for request_id in sent or ():
                self._num_sending[request_id] = self._num_sending.get(request_id, 1) - 1
                if not self._num_sending[request_id]:
                    del self._num_sending[request_id]
                    all_sent.add(request_id)
        return all_sent, all_received

    def get_block_ids_with_load_errors(self) -> set[int]:
        return {
            block_id
            for connector in self.connectors
            for block_id in connector.get_block_ids_with_load_errors()
        }

    def register_kv_caches(self, kv_caches: KVCaches) -> None:
        for connector in self.connectors:
            connector.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(metadata)
        self._bound = []
        if isinstance(metadata, MultiMetadata):
            for connector, part in zip(self.connectors, metadata.parts, strict=True):
                if part:
                    kind = connector.metadata_type
                    connector.bind_connector_metadata(msgspec.msgpack.decode(part, type=kind))
                    self._bound.append(connector)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        for connector in self._bound:
            connector.clear_connector_metadata()
        self._bound = []

    def start_load_kv(self, forward_context: Any = None, **kwargs: Any) -> None:
        # Blocks of preempted sequences are saved before others load into them.
        errors: list[KVLoadError] = []
        for connector in sorted(self._bound, key=lambda c: not isinstance(c, OffloadingConnector)):
            try:
                connector.start_load_kv(forward_context, **kwargs)
            except KVLoadError as error:  # the others' loads begin all the same
                errors.append(error)
        if errors:
            raise errors[0]

    def wait_for_layer_load(self, layer_name: str) -> None:
        for connector in self._bound:
            connector.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Sequence[Tensor], attn_metadata: Any = None, **kwargs: Any
    ) -> None:
        for connector in self._bound:
            connector.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        for connector in self._bound:
            connector.wait_for_save()

    def find_tier(self, block_hash: bytes) -> str:
        tiers = (connector.find_tier(block_hash) for connector in self.connectors)
        return next(filter(None, tiers), "")

    def has_in_memory(self, block_hash: bytes) -> bool:
        return any(connector.has_in_memory(block_hash) for connector in self.connectors)

    @property
    def key_space(self) -> str:
        return next(filter(None, (connector.key_space for connector in self.connectors)), "")

    @property
    def address(self) -> str:
        return next(filter(None, (connector.address for connector in self.connectors)), "")

    def wait_until_saved(self, timeout_s: float) -> None:
        for connector in self.connectors:
            connector.wait_until_saved(timeout_s)

    def fill_stats(self, stats: EngineStats) -> None:
        parts = [EngineStats() for _ in self.connectors]
        for connector, part in zip(self.connectors, parts, strict=True):
            connector.fill_stats(part)
        stats.mm_cache_hits_total += sum(part.mm_cache_hits_total for part in parts)
        stats.cpu_cache_usage_perc = max(part.cpu_cache_usage_perc for part in parts)
        for name in _TOTALS:
            setattr(stats, name, sum(getattr(part, name) for part in parts))
        for name in _BY_TIER:
            total: Counter[str] = Counter()
            for part in parts:
                total.update(getattr(part, name))
            setattr(stats, name, dict(total))

    def set_prefill_pace(self, seconds_per_token: float) -> None:
        for connector in self.connectors:
            connector.set_prefill_pace(seconds_per_token)

    def reset_cache(self) -> None:
        self._loaders.clear()
        for connector in self.connectors:
            connector.reset_cache()

    def reset_encoder_cache(self) -> None:
        for connector in self.connectors:
            connector.reset_encoder_cache()

    def shutdown(self) -> None:
        for connector in self.connectors:
            connector.shutdown()
