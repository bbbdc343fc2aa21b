"""Messages between gateways and engine replicas: msgspec structs over Redis streams.

Torch-free. MessagePack; no pickle crosses a process. Layout in Redis, all keys under a prefix
(default `quire`):

    {prefix}:replica:{replica_id}            string with TTL, a `Heartbeat`
    {prefix}:replicas                        set of replica ids ever seen (a reader drops dead ones)
    {prefix}:owner:{replica_id}              incarnation that serves under this id: writes of any
                                             other one are refused
    {prefix}:news                            channel: `ReplicaEvent` of one that is ready or dead
    {prefix}:inbox:{replica_id}              stream read by the consumer group `engine`, field `m`:
                                             one `InboxMessage`
    {prefix}:log:{replica_id}                stream: the last lines that its process wrote,
                                             maintained by its supervisor
    {prefix}:layers:{replica_id}             how each layer's weights were loaded: a JSON list of
                                             `LayerReport`
    {prefix}:outbox:{gateway_id}             stream, field `m`: one `OutboxBatch` per step
    {prefix}:written                         hash: number of tokens that replicas have written for
                                             each open request, see `written_token_counts`

An inbox entry that holds an `EngineRequest` is acknowledged and deleted only after the request's
last output is written to the outbox: entries of a killed engine stay pending and aren't lost.
"""

from __future__ import annotations

import ctypes
from typing import Any, TypeVar

import msgspec

from engine.contract.errors import EngineFault, InvalidRequest, QuireError
from engine.contract.lora import AdapterRef
from engine.contract.pooling_params import PoolingParams
from engine.contract.redis_keys import (
    base_request_id,
    is_prefill_request,
    output_field,
    prompt_field,
)
from engine.contract.replica_state import EngineStats as EngineStats
from engine.contract.replica_state import Heartbeat
from engine.contract.replica_state import ModelInfo as ModelInfo
from engine.contract.replica_state import PoolingInfo as PoolingInfo
from engine.contract.sampling_params import SamplingParams

#: Dtypes that vectors may have -> bytes per number.
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class PromptEmbeds(msgspec.Struct, array_like=True):
    """A prompt as vectors that replace its tokens' embeddings.

    Attributes:
        dtype: one of `ITEM_BYTES`. rows, size: [num_prompt_tokens, hidden].
        data: the numbers, row by row, little-endian.
    """

    dtype: str
    rows: int
    size: int
    data: bytes

    @property
    def is_complete(self) -> bool:
        """Whether `data` has the length that follows from the other fields."""
        return len(self.data) == self.rows * self.size * ITEM_BYTES.get(self.dtype, 0)


_untrack = ctypes.pythonapi.PyObject_GC_UnTrack
_untrack.argtypes, _untrack.restype = [ctypes.py_object], None


def gc_untracked(token_ids: list[int]) -> list[int]:
    """Return the same list, untracked by the garbage collector.

    The collector would visit every number in it, 0.1 s per collection for a body of 10 MB, during
    which no stream gets a token. A list of numbers can't be part of a cycle.
    """
    _untrack(token_ids)
    return token_ids


T = TypeVar("T")
#: Id of an engine's own warm-up requests.
WARMUP_REQUEST_ID = "warm-up"
CONSUMER_GROUP = "engine"
STREAM_FIELD = b"m"
HEARTBEAT_INTERVAL_S = 0.5
HEARTBEAT_TTL_S = 5.0
#: After this long without a heartbeat a replica gets no new requests if there is another one, which
#: then also takes over its requests.
HEARTBEAT_TIMEOUT_S = 2.5
#: Exit status of a replica whose settings are invalid: a restart would fail in the same way.
EXIT_CONFIG = 2
#: Exit status of a replica that ends because another one of its group has ended or is late.
EXIT_PEER_FAULT = 71
#: A replica whose loop has made no progress for this long isn't ready, even if its port answers.
STALL_TIMEOUT_S = 20.0
#: ... and after this long it is killed and restarted.
DEAD_AFTER_S = 60.0
#: The same while it loads: a device may compile for minutes before it reports progress.
LOAD_DEAD_AFTER_S = 1800.0
#: XADD MAXLEN ~ for an outbox: an abandoned gateway's stream stays bounded.
OUTBOX_MAXLEN = 100_000
#: Expiry of an outbox, renewed by its gateway.
OUTBOX_TTL_S = 60
#: Parts of a replica that can sleep and wake up.
WEIGHTS, KV_CACHE = "weights", "kv_cache"
SLEEP_TAGS = (WEIGHTS, KV_CACHE)
SLEEP_LEVELS = (1, 2)
#: `stop_reason` of outputs that an operator has aborted: the gateway doesn't retry them.
ABORTED_BY_OPERATOR = "operator"
#: How running requests are treated when a replica is paused.
PAUSE_MODES = ("abort", "wait", "keep")


class MediaItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """A picture, video or audio window in a prompt: its content, and the tokens that stand for it.

    Attributes:
        kind: "image", "video", "audio", or "text" for an encoder.
        digest: full sha256 of the encoder's input and of how it was prepared.
        ranges: (first position, count) of the placeholder tokens whose embeddings are the encoder's
            vectors, in order. A picture that is cut into tiles has several; what the model reads by
            cross attention has none.
        grid: frames, rows and columns of its vectors, for models with three-dimensional positions;
            else (). For a video whose frames have a range each: that of one frame.
        time_interval: distance between the positions of two frames.
        retained: a bit for each cell of the grid, or of all frames' grids: whether it has a vector;
            b"": all have.
    """

    kind: str
    digest: bytes
    ranges: tuple[tuple[int, int], ...]
    grid: tuple[int, ...] = ()
    time_interval: float = 1.0
    retained: bytes = b""

    @property
    def start(self) -> int:
        """Position of its first vector."""
        return self.ranges[0][0] if self.ranges else 0

    @property
    def end(self) -> int:
        """Position after its last vector."""
        start, count = self.ranges[-1] if self.ranges else (0, 0)
        return start + count

    @property
    def num_vectors(self) -> int:
        """Number of vectors that the encoder produces for it."""
        return sum(count for _, count in self.ranges)


class EngineRequest(msgspec.Struct, tag="request", omit_defaults=True, kw_only=True):
    """One prompt to generate from, or to pool. The server sets everything about identity.

    Attributes:
        request_id: unique; outputs carry it.
        gateway_id: the gateway whose outbox gets the outputs.
        prompt_token_ids: [num_prompt_tokens], each in [0, vocab_size).
        prompt_embeds: vectors that replace the ids' embeddings; the ids have no meaning then. None:
            none.
        media: pictures in the order of their positions.
        media_data: the encoder's inputs, by digest, see `engine.multimodal.inputs`.
        sampling: validated again by the engine against the vocabulary and the context.
        pooling: the task of a pooling model; `sampling` has no meaning then.
        arrival_time: seconds since the epoch, the gateway's clock.
        tenant, weight: fair-share identity; weight > 0.
        kv_reserved_fraction, kv_max_fraction: fractions of the KV pool that are reserved for the
            tenant, and that it may use at most; in [0, 1].
        priority: smaller runs earlier; 0 is the default.
        cache_namespace: hashed into the first block, so that tenants never share prefixes.
        adapter: the LoRA adapter; None: no adapter.
        resume_token_ids: `resume_token_ids[i]` holds the tokens of output i that a client already
            has; generation continues after them as if it had never stopped. Empty: a new request.
        skip_indices: outputs that the client already has completely; they aren't generated again.
        token_cap: maximum number of output tokens over all outputs, including `resume_token_ids`:
            the server's own limit (a reservation, a budget). None: no limit. At exactly this token
            all outputs end with finish reason "budget". In a beam search each beam counts.
        trace_headers: W3C's `traceparent` and `tracestate` of the calling span; {} for none.
        isolated: it runs in steps of its own until it gets a token: replicas have died in steps
            that included it among others.
        prefilled: a prefill replica has just saved its prompt's blocks in the shared tier.
        kv_peer: tcp://HOST:PORT of that replica if it serves the blocks itself; "": it doesn't.
        do_remote_decode: another replica goes on with the prompt.
        prefix_key: equal for prompts that may share their first KV blocks; b"": unknown.
        log_prompt: whether the tenant stores prompts, so that logs may show this one.
        message_version: see `engine.contract.message_version`.
    """

    request_id: str
    gateway_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams = msgspec.field(default_factory=SamplingParams)
    pooling: PoolingParams | None = None
    arrival_time: float = 0.0
    tenant: str = "default"
    weight: float = 1.0
    kv_reserved_fraction: float = 0.0
    kv_max_fraction: float = 1.0
    priority: int = 0
    cache_namespace: str = ""
    adapter: AdapterRef | None = None
    resume_token_ids: list[list[int]] = msgspec.field(default_factory=list)
    skip_indices: list[int] = msgspec.field(default_factory=list)
    token_cap: int | None = None
    trace_headers: dict[str, str] = msgspec.field(default_factory=dict)
    prompt_embeds: PromptEmbeds | None = None
    media: list[MediaItem] = msgspec.field(default_factory=list)
    media_data: dict[bytes, bytes] = msgspec.field(default_factory=dict)
    isolated: bool = False
    prefilled: bool = False
    kv_peer: str = ""
    do_remote_decode: bool = False
    prefix_key: bytes = b""
    log_prompt: bool = False
    message_version: int = 1

    @property
    def adapter_digest(self) -> str:
        """Digest of the adapter, "" without one."""
        return self.adapter.digest if self.adapter else ""

    @property
    def cache_scope(self) -> tuple[str, str]:
        """Namespace, and digest of the adapter or "": requests that differ in either share neither
        cached blocks nor outputs.
        """
        return self.cache_namespace, self.adapter_digest


class AbortRequest(msgspec.Struct, tag="abort", omit_defaults=True, kw_only=True):
    """Stop a request at the next step. `index` None means all of its outputs.

    `finish_reason` is what the final delta carries ("abort", or "stop" when the gateway found a
    stop string).
    """

    request_id: str
    index: int | None = None
    finish_reason: str = "abort"


class ControlRequest(msgspec.Struct, tag="control", omit_defaults=True, kw_only=True):
    """An operator's command to a replica.

    The replica answers with a `ControlReply` in the gateway's outbox when `gateway_id` is set.

    Attributes:
        command: `reset_prefix_cache`, `reset_encoder_cache`, `drain`, `check_integrity`, `sleep`,
            `wake_up`, `pause`, `resume`, `abort_requests`, `start_profile`, `stop_profile`,
            `load_adapter` (answered once it's on the device) or `unload_adapter` (it is removed
            once no request uses it).
        level: for `sleep`, one of `SLEEP_LEVELS`: 1 keeps the weights in host memory, 2 nowhere.
        tags: for `wake_up`, some of `SLEEP_TAGS`; [] for all.
        mode: for `pause`, one of `PAUSE_MODES`: running requests are aborted; or they finish before
            the answer, and new ones are refused; or they are frozen, and new ones wait.
        request_ids: for `abort_requests`; [] for all.
        running: for `reset_prefix_cache`: running requests free their blocks and recompute them;
            otherwise the cache isn't reset while there are any.
        adapter: for `load_adapter`, and for `unload_adapter`, which needs only the digest.
        pin: for `load_adapter`: never evict it.
    """

    command: str
    control_id: str = ""
    gateway_id: str = ""
    level: int = 1
    tags: list[str] = msgspec.field(default_factory=list)
    mode: str = "abort"
    request_ids: list[str] = msgspec.field(default_factory=list)
    running: bool = False
    adapter: AdapterRef | None = None
    pin: bool = False


class FollowPrefill(msgspec.Struct, tag="follow_prefill", kw_only=True):
    """A prefill replica is computing the prompt of a request that is going to come: read its blocks
    as they are computed. Nothing is answered.

    Attributes:
        request: without `media_data`; `kv_peer` is the address of the prefill replica.
    """

    request: EngineRequest


InboxMessage = EngineRequest | AbortRequest | ControlRequest | FollowPrefill


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log probabilities at one position.

    `token_ids[0]` is the sampled (or prompt) token, the rest the top ones, best first; `ranks[i]`
    is the 1-based vocabulary rank of `token_ids[i]`.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


#: Maximum number of prompt chunks, preemptions and requests ahead that a flight record lists.
MAX_RECORDED_CHUNKS, MAX_NAMED = 32, 4


class FlightRecord(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Timeline of one output of a request inside the engine; times in seconds.

    Attributes:
        queue_time, prefill_time, decode_time: waiting, to the first token, from there to the end.
        prefill_chunks: number of steps in which prompt tokens were computed.
        num_cached_tokens: prompt tokens that hit the prefix cache at the first start.
        num_preemptions, num_steps: number of preemptions, and of steps that included it.
        num_drafts, num_draft_tokens, num_accepted_tokens: steps that verified drafts, the drafts,
            and the accepted ones; see `SpeculativeConfig`.
        cold_reason: why no prefix was cached, "" if one was: "no_shared_prefix",
            "shorter_than_a_block", "evicted", "no_state", "caching_off" or "all_tokens_needed". It
            follows only from what its own namespace has sent.
        chunks: of the first `MAX_RECORDED_CHUNKS` chunks: milliseconds after the request's arrival,
            and tokens.
        preempted_at: of the first `MAX_RECORDED_CHUNKS` preemptions, milliseconds after its
            arrival.
        model_forward_time, model_execute_time: time of its steps in the model's forward pass, and
            in the worker; only with `collect_detailed_traces`.
        num_ahead, num_ahead_own: sequences that ran or waited when the first output was queued: all
            of them, and those of its own tenant.
        behind: ids of its own tenant's requests among them, at most `MAX_NAMED`: never another's.
        numerics_changed: a replica with other `Numerics` continued it: with the same weights, but
            not the tokens that the first replica would have generated. Set by the gateway.
    """

    queue_time: float = 0.0
    prefill_time: float = 0.0
    decode_time: float = 0.0
    prefill_chunks: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    cold_reason: str = ""
    numerics_changed: bool = False
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_drafts: int = 0
    chunks: list[tuple[int, int]] = msgspec.field(default_factory=list)
    preempted_at: list[int] = msgspec.field(default_factory=list)
    num_ahead: int = 0
    num_ahead_own: int = 0
    behind: list[str] = msgspec.field(default_factory=list)
    model_forward_time: float = 0.0
    model_execute_time: float = 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Average number of tokens per step with drafts, including the step's own; 0.0: no such
        steps.
        """
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0


class TokenDelta(msgspec.Struct, omit_defaults=True, kw_only=True):
    """New tokens of one output of one request.

    Attributes:
        index: index of the output, of `n`.
        token_ids: new tokens since the last delta; may be empty on the final one. A stop token is
            included: the gateway decides what the client sees.
        start: number of output tokens before these; a reader drops those that it already has.
        logprobs: one entry per token if requested.
        prompt_logprobs: on the first delta if requested; entry 0 is None.
        finish_reason: None while running; "stop", "length", "abort", "error", "repetition" (see
            `RepetitionDetectionParams`) or "budget" (see `EngineRequest.token_cap`).
        stop_reason: the stop token id that ended it, if one did (None for EOS);
            `ABORTED_BY_OPERATOR` with "abort" if an operator did.
        cumulative_logprob: a beam's, on its only delta.
        num_prompt_tokens, num_cached_tokens: on the first and on the final delta.
        pooled: a pooling model's result on the only delta, little-endian float32: one row, or one
            per prompt token for the tasks by token.
        error: set with finish_reason "error".
        flight: on the final delta.
        kv_transfer_params: what the KV connector says for the answer, on the final delta.
    """

    request_id: str
    index: int = 0
    token_ids: list[int] = msgspec.field(default_factory=list)
    start: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    pooled: bytes | None = None
    error: ErrorInfo | None = None
    flight: FlightRecord | None = None
    kv_transfer_params: dict[str, Any] | None = None


class ErrorInfo(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A `QuireError` on the wire."""

    message: str
    status: int = 500
    error_type: str = "server_error"
    code: str = "internal_error"
    param: str | None = None

    @classmethod
    def of(cls, error: QuireError) -> ErrorInfo:
        """Return the fields of an error that a client sees."""
        return cls(
            message=error.message,
            status=error.status,
            error_type=error.error_type,
            code=error.code,
            param=error.param,
        )

    def to_error(self) -> QuireError:
        """Return an `InvalidRequest` or `EngineFault` to raise in this process."""
        kind = InvalidRequest if self.status == InvalidRequest.status else EngineFault
        return kind(self.message, param=self.param, code=self.code)


class ControlReply(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Answer to a `ControlRequest`."""

    control_id: str
    ok: bool
    detail: str = ""


class OutboxBatch(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Everything that one step produced for one gateway: one stream entry."""

    replica_id: str
    incarnation: str
    step: int
    deltas: list[TokenDelta] = msgspec.field(default_factory=list)
    replies: list[ControlReply] = msgspec.field(default_factory=list)


def written_token_counts(deltas: list[TokenDelta]) -> dict[str, int]:
    """Return the fields of `written_tokens_key`'s hash that deltas update.

    Values are positions in an output, not increments: an output that another replica continues is
    counted once.
    """
    counts: dict[str, int] = {}
    for delta in deltas:
        if is_prefill_request(delta.request_id):
            continue
        request_id = base_request_id(delta.request_id)
        if delta.token_ids:
            count = delta.start + len(delta.token_ids)
            counts[output_field(request_id, delta.index)] = count
        if delta.num_prompt_tokens:
            counts[prompt_field(request_id)] = delta.num_prompt_tokens
    return counts


class ReplicaEvent(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A replica is ready, or (`alive` False) this incarnation of it has ended.

    `held`: the requests in progress when it died, see `engine.system.step_record`; None: unknown.
    """

    replica_id: str
    incarnation: str
    alive: bool = False
    held: list[str] | None = None


_inbox_encoder = msgspec.msgpack.Encoder()
_inbox_decoder = msgspec.msgpack.Decoder(InboxMessage)
_outbox_decoder = msgspec.msgpack.Decoder(OutboxBatch)
_heartbeat_decoder = msgspec.msgpack.Decoder(Heartbeat)
_news_decoder = msgspec.msgpack.Decoder(ReplicaEvent)


def decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    """Decode any bytes. Raises msgspec.DecodeError or ValidationError."""
    try:
        return decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:  # msgspec doesn't convert these
        raise msgspec.DecodeError(str(error)) from error


def encode(message: msgspec.Struct) -> bytes:
    """Encode any message of this module as MessagePack."""
    return _inbox_encoder.encode(message)


def decode_inbox(data: bytes) -> InboxMessage:
    """Raises msgspec.DecodeError or ValidationError for bytes that aren't an inbox message."""
    return decoded(_inbox_decoder, data)


def decode_outbox(data: bytes) -> OutboxBatch:
    """Raises msgspec.DecodeError or ValidationError for bytes that aren't an outbox batch."""
    return decoded(_outbox_decoder, data)


def decode_heartbeat(data: bytes) -> Heartbeat:
    """Raises msgspec.DecodeError or ValidationError for bytes that aren't a heartbeat."""
    return decoded(_heartbeat_decoder, data)


def decode_replica_event(data: bytes) -> ReplicaEvent:
    """Raises msgspec.DecodeError or ValidationError for bytes that aren't a replica event."""
    return decoded(_news_decoder, data)
