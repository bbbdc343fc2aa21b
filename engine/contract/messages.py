"""Messages between gateways and engine replicas: msgspec structs over Redis streams.

Torch-free. MessagePack; no pickle crosses a process. Layout in Redis, all keys under a prefix
(default `quire`):

    {prefix}:replica:{replica_id}            string with TTL, a `Heartbeat`
    {prefix}:replicas                        set of replica ids ever seen (a reader drops dead ones)
    {prefix}:owner:{replica_id}              incarnation that serves under this id: what any other
                                             one still writes is refused
    {prefix}:news                            channel: `ReplicaEvent` of one that is ready or dead
    {prefix}:inbox:{replica_id}              stream read by the consumer group `engine`, field `m`:
                                             one `InboxMessage`
    {prefix}:log:{replica_id}                stream: the last lines that its process wrote,
                                             kept by its supervisor
    {prefix}:layers:{replica_id}             what became of each layer's weights at its last
                                             load: a JSON list of `LayerInfo`
    {prefix}:outbox:{gateway_id}             stream, field `m`: one `OutboxBatch` a step
    {prefix}:written                         hash: how many tokens replicas have written of each
                                             open request, see `written_token_counts`

An inbox entry that holds an `EngineRequest` is acknowledged and deleted only after the request's
last output is written to the outbox: what a killed engine leaves is pending, not lost.
"""

from __future__ import annotations

import ctypes
from typing import Annotated, TypeVar

import msgspec

from engine.contract.errors import EngineFault, InvalidRequest, QuireError
from engine.contract.lora import AdapterRef
from engine.contract.message_version import MESSAGE_VERSION
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
from engine.contract.sampling_params import MAX_N, SamplingParams

#: Types that vectors may come in -> bytes of a number.
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
        """Whether `data` has the length that the other fields say."""
        return len(self.data) == self.rows * self.size * ITEM_BYTES.get(self.dtype, 0)


_untrack = ctypes.pythonapi.PyObject_GC_UnTrack
_untrack.argtypes, _untrack.restype = [ctypes.py_object], None


def gc_untracked(token_ids: list[int]) -> list[int]:
    """Return the same list, untracked by the garbage collector.

    The collector would visit every number of it, 0.1 s per collection for a body of 10 MB, while
    no stream gets a token. A list of numbers can't be part of a cycle.
    """
    _untrack(token_ids)
    return token_ids


T = TypeVar("T")
#: Id of the requests that an engine sends itself before it serves.
WARMUP_REQUEST_ID = "warm-up"
CONSUMER_GROUP = "engine"
STREAM_FIELD = b"m"
HEARTBEAT_INTERVAL_S = 0.5
HEARTBEAT_TTL_S = 5.0
#: After this long without a heartbeat a replica gets no new requests while there is another, which
#: takes over its requests.
HEARTBEAT_TIMEOUT_S = 2.5
#: Exit status of a replica whose settings are refused: started again, it would end the same way.
EXIT_CONFIG = 2
#: A replica whose loop has made no progress for this long isn't ready, whatever its port says.
STALL_TIMEOUT_S = 20.0
#: ... and after this long it's killed and started anew.
DEAD_AFTER_S = 60.0
#: While it loads, after this long: a device may compile for minutes before it reports progress.
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
    """A picture or video in a prompt: which tokens stand for it, and what it is. Or a window of
    sound.

    Attributes:
        kind: "image", "video", "audio".
        digest: sha256 of what the encoder reads and of how it was prepared, whole.
        ranges: (first position, count) of the placeholder tokens whose embeddings are the encoder's
            vectors, in their order. A picture that is cut into tiles has several; sound that the
            model attends to across has none.
        grid: frames, rows and columns of its vectors, for models whose tokens have three positions;
            else (). Of a video whose frames have a range each: that of one frame.
        time_interval: between the positions of two frames.
    """

    kind: str
    digest: bytes
    ranges: tuple[tuple[int, int], ...]
    grid: tuple[int, ...] = ()
    time_interval: float = 1.0

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
        """Vectors that the encoder makes of it."""
        return sum(count for _, count in self.ranges)


class EngineRequest(msgspec.Struct, tag="request", omit_defaults=True, kw_only=True):
    """One prompt to generate from, or to pool. Everything about identity is set by the server.

    Attributes:
        request_id: unique; outputs carry it.
        gateway_id: whose outbox gets the outputs.
        prompt_token_ids: [num_prompt_tokens], each in [0, vocab_size).
        prompt_embeds: vectors in the place of the ids' own, which mean nothing then; None: none.
        media: pictures in the order of their positions.
        media_data: what the encoder reads of them, by digest, see `engine.multimodal.inputs`.
        sampling: validated again by the engine against the vocabulary and the context.
        pooling: what a pooling model is to do instead; `sampling` has no meaning then.
        arrival_time: seconds since the epoch, the gateway's clock.
        tenant, weight: fair-share identity; weight > 0.
        kv_reserved_fraction, kv_max_fraction: of the KV pool: what others leave free for the
            tenant, and the most that it may use; in [0, 1].
        priority: smaller runs earlier; 0 is the default.
        cache_namespace: goes into the first block's hash, so that prefixes never cross tenants.
        adapter: the LoRA adapter to go through; None: the model alone.
        resume_token_ids: `resume_token_ids[i]` holds the tokens of output i that a client already
            has; generation goes on after them as if it had never stopped. Empty: a fresh request.
        skip_indices: outputs that the client already has whole; they aren't generated again.
        token_cap: the most output tokens over all outputs, those of `resume_token_ids` included:
            the server's own limit (a reservation, a budget). None: none. At exactly this token all
            outputs end with finish reason "budget". In a beam search each beam counts.
        trace_headers: W3C's `traceparent` and `tracestate` of the span that asked; {} for none.
        isolated: it runs in steps of its own until it brings a token: replicas have died over steps
            that held it among others.
        prefilled: a prefill replica has just saved its prompt's blocks in the shared tier.
        kv_peer: tcp://HOST:PORT of that replica where it serves them itself; "": it doesn't.
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
    message_version: int = 1

    @property
    def adapter_digest(self) -> str:
        """Digest of the adapter, "" without one."""
        return self.adapter.digest if self.adapter else ""

    @property
    def cache_scope(self) -> tuple[str, str]:
        """Namespace, and digest of the adapter or "": who differs in either shares nothing that was
        computed or said.
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
            `load_adapter` (answered once it's on the device) or `unload_adapter` (it goes when
            nobody uses it any more).
        level: of `sleep`, one of `SLEEP_LEVELS`: 1 keeps the weights in host memory, 2 nowhere.
        tags: of `wake_up`, some of `SLEEP_TAGS`; [] for all.
        mode: of `pause`, one of `PAUSE_MODES`: running requests are aborted; they come to their end
            before the answer, while nothing new is taken; or they stand still, new ones wait.
        request_ids: of `abort_requests`; [] for all.
        running: of `reset_prefix_cache`: requests that run give their blocks back and compute them
            anew; without it the cache isn't reset while there are any.
        adapter: of `load_adapter`, and of `unload_adapter`, which needs the digest alone.
        pin: of `load_adapter`: never drive it out.
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


InboxMessage = EngineRequest | AbortRequest | ControlRequest


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log probabilities at one position.

    `token_ids[0]` is the sampled (or prompt) token, the rest the top ones, best first; `ranks[i]`
    is the 1-based vocabulary rank of `token_ids[i]`.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


#: What a flight record names at most: prompt chunks and preemptions, requests that were ahead.
MAX_RECORDED_CHUNKS, MAX_NAMED = 32, 4


class FlightRecord(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What happened to one output of a request inside the engine; times in seconds.

    Attributes:
        queue_time, prefill_time, decode_time: waiting, to the first token, from there to the end.
        prefill_chunks: steps in which prompt tokens were computed.
        num_cached_tokens: prompt tokens found in the prefix cache at the first start.
        num_preemptions, num_steps: how often its blocks were taken; steps that it was part of.
        num_drafts, num_draft_tokens, num_accepted_tokens: steps that checked guesses at its tokens,
            the guesses, and those that held; see `SpeculativeConfig`.
        cold_reason: why none was found, "" if some were: "no_shared_prefix",
            "shorter_than_a_block", "evicted", "no_state", "caching_off" or "all_tokens_needed". It
            follows from what its own namespace has sent alone.
        chunks: of the first `MAX_RECORDED_CHUNKS` of them: milliseconds after the request came,
            and tokens.
        preempted_at: of the first `MAX_RECORDED_CHUNKS` preemptions, in milliseconds after it came.
        model_forward_time, model_execute_time: in the model's forward pass, and in all of the
            worker, of the steps that it was part of; only with `collect_detailed_traces`.
        num_ahead, num_ahead_own: sequences that ran or waited when the first output was queued, all
            of them and its own tenant's.
        behind: ids of its own tenant's requests among them, `MAX_NAMED` at most: never another's.
        numerics_changed: a replica with other `Numerics` went on with it: the same weights, but not
            the tokens that the first replica would have made. Set by the gateway.
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
        """Tokens that a step with drafts gave on average, its own included; 0.0: none had any."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0


class TokenDelta(msgspec.Struct, omit_defaults=True, kw_only=True):
    """New tokens of one output of one request.

    Attributes:
        index: which of the `n` outputs.
        token_ids: new tokens since the last delta; may be empty on the final one. A stop token is
            included: the gateway decides what the client sees.
        start: how many output tokens came before these; a reader drops what it already has.
        logprobs: one entry a token when asked for.
        prompt_logprobs: on the first delta when asked for; entry 0 is None.
        finish_reason: None while running; "stop", "length", "abort", "error", "repetition" (see
            `RepetitionDetectionParams`) or "budget" (see `EngineRequest.token_cap`).
        stop_reason: the stop token id that ended it, if one did (EOS leaves None);
            `ABORTED_BY_OPERATOR` with "abort" when an operator did.
        cumulative_logprob: a beam's, on its only delta.
        num_prompt_tokens, num_cached_tokens: on the first and on the final delta.
        pooled: a pooling model's result on the only delta, little-endian float32: one row, or one a
            prompt token for the tasks by token.
        error: set with finish_reason "error".
        flight: on the final delta.
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
    """All that one step produced for one gateway. One stream entry."""

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
    """A replica is ready, or (`alive` False) this incarnation of it is gone for good.

    `held`: the requests that it was at when it died, see `engine.system.step_record`; None: it's
    not known.
    """

    replica_id: str
    incarnation: str
    alive: bool = False
    held: list[str] | None = None


_OutputCount = Annotated[int, msgspec.Meta(ge=1, le=MAX_N)]


class _NumOutputs(msgspec.Struct):
    """What of a request's sampling parameters says how many outputs end."""

    n: _OutputCount = 1
    best_of: _OutputCount | None = None


class UnreadableRequest(msgspec.Struct, kw_only=True):
    """What is left of an `EngineRequest` of another release that can't be read. Never sent.

    Attributes:
        problem: why it can't.
    """

    request_id: str
    gateway_id: str
    sampling: _NumOutputs = msgspec.field(default_factory=_NumOutputs)
    message_version: int = 1
    problem: str = ""

    @property
    def error(self) -> EngineFault:
        """What its client is told."""
        return EngineFault(
            f"The replica can't read this request: {self.problem}. The gateway writes messages of "
            f"version {self.message_version}, the replica reads those of version "
            f"{MESSAGE_VERSION}: update the older one.",
            code="unreadable_request",
        )

    @property
    def num_sequences(self) -> int:
        """Number of outputs that the gateway waits for."""
        return self.sampling.best_of or self.sampling.n


_inbox_encoder = msgspec.msgpack.Encoder()
_inbox_decoder = msgspec.msgpack.Decoder(EngineRequest | AbortRequest | ControlRequest)
_unreadable_decoder = msgspec.msgpack.Decoder(UnreadableRequest)
_outbox_decoder = msgspec.msgpack.Decoder(OutboxBatch)
_heartbeat_decoder = msgspec.msgpack.Decoder(Heartbeat)
_news_decoder = msgspec.msgpack.Decoder(ReplicaEvent)


def _decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:  # of which msgspec makes none of its own
        raise msgspec.DecodeError(str(error)) from error


def encode(message: msgspec.Struct) -> bytes:
    """Any message of this module as MessagePack."""
    return _inbox_encoder.encode(message)


def decode_inbox(data: bytes) -> InboxMessage:
    """Raises msgspec.DecodeError or ValidationError for bytes that are no inbox message."""
    return _decoded(_inbox_decoder, data)


def decode_unreadable_request(data: bytes, problem: str) -> UnreadableRequest:
    """Who sent a message that `decode_inbox` refuses. Raises as `decode_inbox`, if nobody waits."""
    request = _decoded(_unreadable_decoder, data)
    request.problem = problem
    return request


def decode_outbox(data: bytes) -> OutboxBatch:
    """Raises msgspec.DecodeError or ValidationError for bytes that are no outbox batch."""
    return _decoded(_outbox_decoder, data)


def decode_heartbeat(data: bytes) -> Heartbeat:
    """Raises msgspec.DecodeError or ValidationError for bytes that are no heartbeat."""
    return _decoded(_heartbeat_decoder, data)


def decode_replica_event(data: bytes) -> ReplicaEvent:
    """Raises msgspec.DecodeError or ValidationError for bytes that are no news."""
    return _decoded(_news_decoder, data)
