"""`KVConnectorBase`: the interface that saves and loads KV blocks, with vLLM's names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec
from torch import Tensor

from engine.contract.replica_state import EngineStats
from engine.kv_cache import BlockHashes

#: By layer name, the tensors whose first dimension is the block: keys, values, scales. For models
#: whose layers carry states, the last entry has those of all layers.
KVCaches = Mapping[str, Sequence[Tensor]]


class KVConnectorMetadata(msgspec.Struct):
    """The connector's part of a step's plan; each connector has its own subclass."""


class MediaItemView(Protocol):
    """Position of a picture or audio in a prompt: see `MediaItem`."""

    @property
    def end(self) -> int: ...


class EncoderItemView(Protocol):
    """A request's encoder input: see `EncoderItem`."""

    @property
    def item(self) -> MediaItemView: ...

    @property
    def key(self) -> bytes: ...


class RequestView(Protocol):
    """The fields of a sequence that a connector may read."""

    @property
    def seq_id(self) -> int: ...

    @property
    def request_id(self) -> str: ...

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_computed_tokens(self) -> int: ...

    @property
    def block_hashes(self) -> BlockHashes: ...

    @property
    def cache_namespace(self) -> str: ...

    @property
    def tenant(self) -> str: ...

    @property
    def prefilled(self) -> bool: ...

    @property
    def kv_peer(self) -> str: ...

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None: ...

    @property
    def encoder_key(self) -> bytes: ...

    @property
    def num_encoder_states(self) -> int: ...

    @property
    def media(self) -> Sequence[EncoderItemView]: ...


class NewSequenceView(Protocol):
    """A sequence that starts in a step: see `NewSequence`."""

    @property
    def seq_id(self) -> int: ...

    @property
    def num_computed_tokens(self) -> int: ...

    @property
    def block_ids(self) -> list[list[int]]: ...


class EncodeTaskView(Protocol):
    """A run of the encoder: see `EncodeTask`."""

    @property
    def seq_id(self) -> int: ...


class PlanView(Protocol):
    """The fields of a `StepPlan` that a connector may read."""

    @property
    def step(self) -> int: ...

    @property
    def new(self) -> Sequence[NewSequenceView]: ...

    @property
    def new_blocks(self) -> list[tuple[int, list[list[int]]]]: ...

    @property
    def removed(self) -> list[int]: ...

    @property
    def checkpoints(self) -> list[tuple[int, int, int]]: ...

    @property
    def encode(self) -> Sequence[EncodeTaskView]: ...


class KVLoadError(Exception):
    """A connector has failed to load a step's blocks."""


class KVConnectorBase(ABC):
    """Saves KV blocks outside the KV cache and loads them again. After vLLM's `KVConnectorBase_V1`.

    One object does the work of both sides. The engine's thread calls the scheduler's side, and the
    thread that runs steps the worker's side; with async scheduling these are two threads.

    A class of another package is created with `(vllm_config, role, kv_cache_config)`; see
    docs/extending.md.

    Attributes:
        metadata_type: class of `build_connector_meta`'s results.
        last_step: number of the last step whose metadata was bound.
    """

    metadata_type: type[KVConnectorMetadata] = KVConnectorMetadata
    last_step: int = 0
    _metadata: KVConnectorMetadata | None = None

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Number of tokens after the first `num_computed_tokens` whose KV can be loaded, and
        whether while steps run.

        None: not known yet; the request is looked up again in the next step, and those behind it
        wait as well.

        False: at least one token must be left to compute, and loading must not fail any more. They
        are loaded in the step that starts the request, before its tokens are computed.

        True: the next plan's `start_load_kv` begins to load into the blocks that
        `update_state_after_alloc` is told, and the request waits until `get_finished` names it as
        received. Its full blocks are loaded then. At most `READ_TIMEOUT_S`: then it is computed.
        """

    def start_read_ahead(
        self, request: RequestView, num_computed_tokens: int, needs_encoding: bool = False
    ) -> Future[None] | None:
        """For a new request: read ahead the blocks after its first tokens to where `start_load_kv`
        finds them, and with `needs_encoding` those of its encoder states. The request waits for the
        future; None: it needn't wait. Not in vLLM.
        """
        return None

    def follow_prefill(self, request: RequestView, num_computed_tokens: int) -> None:  # noqa: B027
        """A prefill replica computes the prompt of a request that comes later: read the blocks
        after its first tokens as they are computed. Not in vLLM.
        """

    def stop_following(self, request_id: str) -> None:  # noqa: B027
        """A request that `follow_prefill` named isn't computed any more. Not in vLLM."""

    def load_encoder_states(self, request: RequestView, block_ids: list[list[int]]) -> bool:
        """For a request that starts without encoder states in the KV cache: whether they are
        loaded, so that the encoder needn't run. `block_ids`: its block tables by group. Not in
        vLLM.
        """
        return False

    @abstractmethod
    def update_state_after_alloc(
        self, request: RequestView, block_ids: list[list[int]], num_external_tokens: int
    ) -> None:
        """The request starts: its block tables by group, and the number of tokens to load."""

    @abstractmethod
    def build_connector_meta(
        self, plan: PlanView, scheduled: Sequence[RequestView]
    ) -> KVConnectorMetadata | None:
        """The connector's part of a plan; None: it has nothing to do in this step.

        `scheduled`: the plan's sequences; their `num_computed_tokens` include the step.
        """

    def request_preempted(self, request: RequestView, block_ids: list[list[int]]) -> None:  # noqa: B027
        """A running request is about to lose its blocks; they are valid up to its
        `num_computed_tokens`, and until the forward pass of the next plan.
        """

    def request_finished(
        self, request: RequestView, block_ids: list[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended. `block_ids`: [] if it has none.

        Returns whether its blocks stay until `get_finished` names it as sent, and what the answer's
        `kv_transfer_params` say.
        """
        return False, None

    def get_finished(
        self, finished_req_ids: set[str]
    ) -> tuple[Collection[str] | None, Collection[str] | None]:
        """Ids of requests whose blocks are sent, and of those whose blocks are received, since the
        last call; those of aborted requests, too: their blocks stay until then. Called by the
        engine's thread before each step. `finished_req_ids`: requests that have ended since then.
        """
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Ids of blocks that weren't received since the last call, of requests that `get_finished`
        names as received, or will: they are computed. Called after it.
        """
        return set()

    @abstractmethod
    def register_kv_caches(self, kv_caches: KVCaches) -> None:
        """Called when the KV cache has been allocated (again)."""

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        """Set the plan's part that the calls up to `clear_connector_metadata` refer to."""
        self._metadata = metadata

    def clear_connector_metadata(self) -> None:
        """Called when the step is done."""
        self._metadata = None

    @abstractmethod
    def start_load_kv(self, forward_context: Any = None, **kwargs: Any) -> None:
        """Load the plan's blocks; called before the forward pass."""

    def wait_for_layer_load(self, layer_name: str) -> None:  # noqa: B027
        """Wait until a layer's blocks are loaded; called for all layers before the forward pass."""

    def save_kv_layer(  # noqa: B027
        self, layer_name: str, kv_layer: Sequence[Tensor], attn_metadata: Any = None, **kwargs: Any
    ) -> None:
        """Save a layer's blocks; called for all layers after the forward pass."""

    def wait_for_save(self) -> None:  # noqa: B027
        """Wait until the plan's blocks may be overwritten."""

    def find_tier(self, block_hash: bytes) -> str:
        """Name of the tier that has a block, "" for none. Not in vLLM."""
        return ""

    def has_in_memory(self, block_hash: bytes) -> bool:
        """Whether new requests load a block from memory that no other replica shares. Called in any
        thread. Not in vLLM.
        """
        return False

    @property
    def key_space(self) -> str:
        """Sha256 that is equal where replicas can load one another's blocks, 64 hex digits; "":
        others can't load them. Not in vLLM.
        """
        return ""

    @property
    def address(self) -> str:
        """tcp://HOST:PORT where other replicas read this one's blocks; "": nowhere. Not in vLLM."""
        return ""

    def wait_until_saved(self, timeout_s: float) -> None:  # noqa: B027
        """Wait until others can load the blocks of past steps, for at most so long. Called in a
        thread of its own where the role is kv_producer. Not in vLLM.
        """

    def fill_stats(self, stats: EngineStats) -> None:  # noqa: B027
        """Set the statistics that are the connector's."""

    def set_prefill_pace(self, seconds_per_token: float) -> None:  # noqa: B027
        """Set the seconds that computing a prompt token takes; loading should take less."""

    def reset_cache(self) -> None:  # noqa: B027
        """Never load again what was saved so far: the model's weights may have changed."""

    def reset_encoder_cache(self) -> None:  # noqa: B027
        """Never load again what an encoder has made so far. Not in vLLM."""

    def shutdown(self) -> None:  # noqa: B027
        """Release memory, threads and files."""


#: vLLM's name.
KVConnectorBase_V1 = KVConnectorBase
