"""A replica's state for gateways: model, counters, heartbeat, KV map. Torch-free."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.contract.kv_transfer_config import EC_BOTH, EC_CONSUMER, EC_PRODUCER, KV_PRODUCER
from engine.contract.lora import AdapterStatus
from engine.contract.metrics import Histogram
from engine.contract.redis_keys import KEY_PREFIX

# An observer increments `watch_key` and renews its expiry. The replica reads it with each heartbeat
# and publishes `KVMapFrame`s on `frames_key` until the key expires. A new number makes it start
# with a full frame. Frames name tenants and requests: before a frame is shown to a tenant, those of
# other tenants must be removed.

#: How long a replica continues to publish after an observer last renewed its key.
WATCH_TTL_S = 5
#: Maximum number of requests listed for one block.
MAX_LISTED_USERS = 4


def watch_key(replica_id: str, prefix: str = KEY_PREFIX) -> str:
    """Key of the number of observers that have subscribed to a replica's blocks."""
    return f"{prefix}:watch:{replica_id}"


def frames_key(replica_id: str, prefix: str = KEY_PREFIX) -> str:
    """Channel of a replica's `KVMapFrame`s."""
    return f"{prefix}:blocks:{replica_id}"


class TenantBlocks(msgspec.Struct, array_like=True):
    """One tenant's blocks and sequences; `maximum` and `reserved` in blocks.

    Attributes:
        states: recurrent states in use; 0 for models without.
        retained_states: free ones that it used last; many are checkpoints of prefixes.
    """

    name: str
    used: int
    free: int
    reserved: int
    maximum: int
    running: int
    waiting: int
    states: int = 0
    retained_states: int = 0


class KVMapBlock(msgspec.Struct, array_like=True, gc=False):
    """A block that changed.

    Attributes:
        refs: number of sequences that use it. cached: whether a prefix could hit it.
        owner: index in `KVMapFrame.words`: the tenant that it's charged to or that used it last.
        users: indices, ids of requests that use it, at most `MAX_LISTED_USERS`.
        adapter: index, name of the adapter that it was computed with; "" for none.
        tier: index, the KV tier that also had it when it changed; "" for none.
        media: index, kind and digest of the first image, video or audio among its tokens, if a
            request of its owner has used it; "" for none.
    """

    block_id: int
    refs: int
    cached: bool
    owner: int
    users: list[int]
    adapter: int
    tier: int | None = None
    media: int | None = None


class KVMapFrame(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Changes of the KV map since the previous frame.

    Attributes:
        number: from 1, without gaps within a `run`, which starts with each full frame.
        whole: `blocks` has all that were ever used; the others are free and empty.
        evicted: cached blocks that were reallocated since the previous frame.
        words: the strings that the numbers in `blocks` refer to, for this frame alone.
    """

    replica_id: str
    incarnation: str
    number: int
    run: int
    at: float
    num_blocks: int
    block_size: int
    num_free: int
    num_cached: int
    whole: bool = False
    evicted: int = 0
    tenants: list[TenantBlocks] = msgspec.field(default_factory=list)
    words: list[str] = msgspec.field(default_factory=list)
    blocks: list[KVMapBlock] = msgspec.field(default_factory=list)


_decoder = msgspec.msgpack.Decoder(KVMapFrame)


def decode_frame(data: bytes) -> KVMapFrame:
    """Raises msgspec.DecodeError or ValidationError for bytes that aren't a frame."""
    return _decoder.decode(data)


#: In order. Weights are quantized and packed while they are read, a few megabytes at a time.
DOWNLOADING, KERNELS, READING, CACHE, WARM_UP = (
    "downloading",
    "kernels",
    "reading",
    "cache",
    "warm_up",
)
PHASES = (DOWNLOADING, KERNELS, READING, CACHE, WARM_UP)


class LoadPhase(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One of `PHASES`; `done` of `total` bytes while it downloads or reads, 0 of 0 otherwise."""

    phase: str
    done: int = 0
    total: int = 0


LoadPhaseCallback = Callable[[LoadPhase], None]
#: This process's callbacks: it loads one model at a time, but downloads in several threads.
_watchers: list[LoadPhaseCallback] = []


@contextmanager
def observe_load_phases(watcher: LoadPhaseCallback) -> Iterator[None]:
    """Call `watcher` with the load phases that any thread reports meanwhile."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def report_load_phase(phase: str, done: int = 0, total: int = 0) -> None:
    """Report a load phase to all observers."""
    for watcher in _watchers:
        watcher(LoadPhase(phase=phase, done=done, total=total))


class Numerics(msgspec.Struct, omit_defaults=True, kw_only=True, frozen=True):
    """Everything that determines the bits of a replica's tokens: equal ones generate equal tokens.

    Attributes:
        weights: sha256 over the model's configuration and weights, 64 hex digits.
        isa: the instruction set in use, or the GPU's name.
        kernels: build of the kernels, and of the library that computes everything else.
        dtype, quantization, kv_cache_dtype: of activations and unquantized weights; of quantized
            weights; of keys and values.
        settings: other settings that change numerical results, by name.
    """

    weights: str
    isa: str = ""
    kernels: str = ""
    dtype: str = ""
    quantization: str = ""
    kv_cache_dtype: str = ""
    settings: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """Sha256 of all fields, 64 hex digits."""
        return hashlib.sha256(msgspec.msgpack.encode(self, order="sorted")).hexdigest()


class PoolingInfo(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Facts for gateways about a pooling model.

    Attributes:
        embedding_size: size of a full embedding, or number of labels of a classifier.
        matryoshka: sizes to which embeddings may be cut; None: no others, []: any.
        labels: a classifier's, in order.
        prompt: prefix of every text that is embedded.
        similarity: similarity of two embeddings: "cosine", "dot", "euclidean" or "manhattan".
        token_types: the model distinguishes a pair's two parts by token types.
        image_or_text: a prompt is either a text or one image, for which an EOS token stands.
    """

    embedding_size: int
    matryoshka: list[int] | None = None
    labels: list[str] = msgspec.field(default_factory=list)
    prompt: str = ""
    similarity: str = "cosine"
    token_types: bool = False
    image_or_text: bool = False


@dataclass(frozen=True, slots=True)
class LayerReport:
    """How one layer's weights were loaded.

    Attributes:
        layer: the checkpoint's names of its parts.
        format: format of all of its parts in the checkpoint.
        level: see `WeightsInfo`.
        nbytes: bytes that a forward pass reads.
        error: largest difference from the dequantized weights over some rows, relative to the
            largest of these.
    """

    layer: str
    format: str
    level: str
    nbytes: int
    error: float


class WeightsInfo(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Layers whose weights were loaded in the same way.

    Attributes:
        format: of the checkpoint.
        level: "kept": the kernels compute with the checkpoint's exact numbers; "read": they were
            rounded to another format, or stored in more bits.
        layers: number of layers. nbytes: bytes that one pass over all of them reads.
        error: the largest difference from the dequantized weights, relative to the largest weight.
    """

    format: str
    level: str
    layers: int
    nbytes: int
    error: float = 0.0


class ModelInfo(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Facts for gateways about a replica's model, to check and render requests.

    `path` is the folder with tokenizer files; gateways and replicas share it by volume or by image.
    `tasks` is "generate", or the tasks of a pooling model (`engine.contract.pooling_params`);
    `pooling` is for the latter. `cache_config`: labels of `vllm:cache_config_info`, as text.
    `io_processor`: the plug-in that reads and answers `data`, "" for none. `tool_call_parser` and
    `reasoning_parser` are names, "" to detect them from the chat template. `chat_template`: source
    of a template that replaces the folder's. `prompt_embeds_size`: size of the vectors that may
    replace a prompt's tokens, 0: not allowed. `sees`: its prompts may contain pictures, at most
    `max_images` images, `max_videos` videos and `max_audios` audios. `encoder_length` and
    `num_mels`: number of states of its audio encoder that tokens attend to, and values per frame of
    the encoder's input; 0 without one. `max_encoder_tokens`: of a text that its encoder reads, 0
    without one, and `decoder_start_ids` what an output then begins with. `pruning_rates`: see
    `MediaProcessor`; `mm_processor_kwargs`, `media_io_kwargs`: of requests without them.
    `num_ranks` processes share the model.
    """

    name: str
    path: str
    max_model_len: int
    vocab_size: int
    dtype: str
    max_logprobs: int = 20
    kv_capacity_tokens: int = 0
    eos_token_ids: list[int] = msgspec.field(default_factory=list)
    default_sampling: dict[str, Any] = msgspec.field(default_factory=dict)
    quantization: str = ""
    tasks: list[str] = msgspec.field(default_factory=lambda: ["generate"])
    pooling: PoolingInfo | None = None
    tool_call_parser: str = ""
    chat_template: str = ""
    reasoning_parser: str = ""
    weights: list[WeightsInfo] = msgspec.field(default_factory=list)
    cache_config: dict[str, str] = msgspec.field(default_factory=dict)
    io_processor: str = ""
    prompt_embeds_size: int = 0
    sees: bool = False
    encoder_length: int = 0
    num_mels: int = 0
    max_encoder_tokens: int = 0
    decoder_start_ids: list[int] = msgspec.field(default_factory=list)
    num_ranks: int = 1
    max_images: int = 64
    max_videos: int = 0
    max_audios: int = 0
    pruning_rates: dict[str, float] = msgspec.field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    media_io_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def media(self) -> list[str]:
        """Kinds of media that prompts may contain: "images", "videos", "audio"."""
        limits = {
            "images": self.max_images if self.sees else 0,
            "videos": self.max_videos,
            "audio": self.max_audios,
        }
        return [kind for kind, limit in limits.items() if limit]

    @property
    def prompt_context(self) -> int:
        """Tokens of which a prompt must have fewer: of the decoder's context, or of the encoder."""
        return self.max_encoder_tokens + 1 if self.max_encoder_tokens else self.max_model_len


class ProcessStats(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Statistics of a replica's process, from the operating system and Python.

    Attributes:
        resident_bytes, virtual_bytes: its memory.
        cpu_seconds: user and system time, of all threads.
        start_time: seconds since the epoch. open_fds, max_fds: file descriptors.
        gc_collections, gc_collected, gc_uncollectable: of Python's collector, by generation.
    """

    resident_bytes: int = 0
    virtual_bytes: int = 0
    cpu_seconds: float = 0.0
    start_time: float = 0.0
    open_fds: int = 0
    max_fds: int = 0
    gc_collections: list[int] = msgspec.field(default_factory=list)
    gc_collected: list[int] = msgspec.field(default_factory=list)
    gc_uncollectable: list[int] = msgspec.field(default_factory=list)


class EngineStats(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A replica's load and its running totals since it started (names follow vLLM's metrics)."""

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    kv_cache_usage_perc: float = 0.0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_preemptions_total: int = 0
    #: Computed ones; tokens that hit the prefix cache aren't included.
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    #: Tokens per second over five seconds.
    avg_prompt_throughput_toks_per_s: float = 0.0
    avg_generation_throughput_toks_per_s: float = 0.0
    prefix_cache_queries_total: int = 0
    prefix_cache_hits_total: int = 0
    #: Over the last 1,000 started sequences, in [0, 1].
    prefix_cache_hit_rate: float = 0.0
    #: Images, videos and audios that sequences needed encoded, and those that were encoded already.
    mm_cache_queries_total: int = 0
    mm_cache_hits_total: int = 0
    prefix_cold_total: dict[str, int] = msgspec.field(default_factory=dict)
    requests_finished_total: dict[str, int] = msgspec.field(default_factory=dict)
    #: Device memory that LoRA adapters use, and may use; number of loads, and their total time.
    adapter_bytes: int = 0
    adapter_capacity_bytes: int = 0
    #: Maximum number on the device; 0: as many as fit into its bytes.
    adapter_slots: int = 0
    adapter_loads_total: int = 0
    adapter_load_seconds_total: float = 0.0
    adapter_evictions_total: int = 0
    num_requests_swapped: int = 0
    #: Used fraction of the host memory for KV blocks, in [0, 1].
    cpu_cache_usage_perc: float = 0.0
    #: Prompt tokens looked up in and loaded from KV tiers, blocks saved in them, blocks that
    #: couldn't be used or saved by reason, and bytes by tier.
    external_prefix_cache_queries_total: int = 0
    external_prefix_cache_hits_total: int = 0
    kv_tier_saved_blocks_total: int = 0
    kv_tier_failures_total: dict[str, int] = msgspec.field(default_factory=dict)
    kv_tier_bytes: dict[str, int] = msgspec.field(default_factory=dict)
    kv_tier_capacity_bytes: dict[str, int] = msgspec.field(default_factory=dict)
    #: By tier, for tokens of new sequences: number of tokens loaded, number that it has had and
    #: that a larger tier would still have, and seconds that loading the former has saved over
    #: computing them, by the pace measured at startup.
    kv_tier_hit_tokens_total: dict[str, int] = msgspec.field(default_factory=dict)
    kv_tier_evicted_tokens_total: dict[str, int] = msgspec.field(default_factory=dict)
    kv_tier_saved_seconds_total: dict[str, float] = msgspec.field(default_factory=dict)
    steps_total: int = 0
    last_step_ms: float = 0.0
    #: Seconds that the first of several ranks has waited for the others.
    collective_seconds_total: float = 0.0
    #: Rows with drafts, the drafts, the accepted ones, and these by their position after the row's
    #: newest token.
    spec_decode_num_drafts_total: int = 0
    spec_decode_num_draft_tokens_total: int = 0
    spec_decode_num_accepted_tokens_total: int = 0
    spec_decode_num_accepted_tokens_per_pos_total: list[int] = msgspec.field(default_factory=list)
    #: By the names of `engine.contract.metrics.ENGINE_HISTOGRAMS`.
    histograms: dict[str, Histogram] = msgspec.field(default_factory=dict)


class TierReport(msgspec.Struct):
    """Content of a KV tier. `failures`: unusable records, by reason."""

    num_records: int = 0
    num_bytes: int = 0
    failures: dict[str, int] = msgspec.field(default_factory=dict)


class KVHandover(msgspec.Struct, omit_defaults=True, kw_only=True, frozen=True):
    """A replica's role when prompts are computed on one replica and outputs generated on another.

    Attributes:
        role: its `kv_role`: kv_producer only computes prompts, the others load their blocks.
        key_space: sha256 of the storage and of everything that its blocks' keys have in common, 64
            hex digits: replicas with the same one can load one another's blocks.
        step_tokens: token budget of a step: shorter prompts need only one.
        address: tcp://HOST:PORT where it serves its blocks; "": they are in a storage.
        ec_role: its `ec_role`: ec_producer only encodes for others, which load what it has saved;
            "": encoder outputs aren't saved.
    """

    role: str
    key_space: str
    step_tokens: int
    address: str = ""
    ec_role: str = ""

    @property
    def only_prepares(self) -> bool:
        """Whether it computes prompts, or encodes, for replicas that answer."""
        return self.role == KV_PRODUCER or self.ec_role == EC_PRODUCER

    @property
    def only_encodes(self) -> bool:
        """Whether it has the model's encoder alone: it computes no prompt and answers nothing."""
        return self.ec_role == EC_PRODUCER and self.role != KV_PRODUCER

    @property
    def saves_encodings(self) -> bool:
        """Whether other replicas can load its encoder outputs."""
        return self.ec_role in (EC_BOTH, EC_PRODUCER)

    @property
    def loads_encodings(self) -> bool:
        """Whether it loads encoder outputs of other replicas."""
        return self.ec_role in (EC_BOTH, EC_CONSUMER)


class Heartbeat(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Written every `HEARTBEAT_INTERVAL_S` with TTL `HEARTBEAT_TTL_S`.

    `state`: "loading", "ready", "sleeping" (its memory is released), "draining" or "failed".
    `incarnation` changes at each start. `progress_at`: the last iteration of the engine loop
    (seconds since the epoch): a replica whose port answers while this stands still is unhealthy.
    `paused`: an operator has paused it; its requests continue when it is resumed. `adapters`: those
    that it has in any tier. `sleep_level`: of a sleeping model, 1 or 2; 0: awake. `numerics`: what
    determines its tokens' bits; None while unknown. `spare`: it gets requests only while no other
    replica of its model does. `loading`: current phase of loading; `load_progress`: loaded fraction
    of its layers. `held`: the requests in progress, once its loop has stood still for a while; else
    None. `kv_handover`: None: it has no KV tier that other replicas share. `message_version`: see
    `engine.contract.message_version`. `endpoint`: "host:port" of the gateway in its pod, for
    endpoint pickers; "" for none. `cached_prefixes`: `EngineRequest.prefix_key` of recent prompts
    whose beginning its KV cache or its own host memory still has.
    """

    replica_id: str
    incarnation: str
    state: str
    model: ModelInfo
    at: float
    progress_at: float
    pid: int = 0
    host: str = ""
    detail: str = ""
    load_progress: float = 0.0
    stats: EngineStats = msgspec.field(default_factory=EngineStats)
    paused: bool = False
    numerics: Numerics | None = None
    spare: bool = False
    adapters: list[AdapterStatus] = msgspec.field(default_factory=list)
    process: ProcessStats = msgspec.field(default_factory=ProcessStats)
    sleep_level: int = 0
    loading: LoadPhase | None = None
    held: list[str] | None = None
    kv_handover: KVHandover | None = None
    message_version: int = 1
    endpoint: str = ""
    cached_prefixes: frozenset[bytes] = frozenset()
