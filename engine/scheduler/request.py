"""A request inside the engine, and its sequences: one for each output that it generates."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from engine.contract.messages import EngineRequest, FlightRecord, TokenLogprobs
from engine.contract.sampling_params import SamplingParams
from engine.kv_cache import BlockHashes
from engine.scheduler.encoder_cache import EncoderItem
from engine.scheduler.plan import EncoderInput


class SequenceStatus(enum.Enum):
    """Where a sequence stands."""

    #: Its adapter is being read or its grammar compiled; the scheduler doesn't know it yet.
    WAITING_FOR_ADMISSION = "waiting_outside"
    #: A beam that hasn't begun, or has given its blocks back while it waits for other beams; the
    #: scheduler has it in no list.
    PARKED_BEAM = "parked"
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens of one output of one request, and how far their KV is computed.

    There is no prefill or decode state: each step moves `num_computed_tokens` towards `num_tokens`,
    and when they meet the next token is sampled.
    """

    #: Unique in this engine, in order of arrival.
    seq_id: int
    request: Request
    #: Which of the request's outputs.
    index: int
    #: Prompt, then output; grows by sampling.
    token_ids: list[int]
    num_prompt_tokens: int
    #: Most output tokens: from max_tokens, the context and the pool.
    max_output_tokens: int
    #: Seed of this output, resolved.
    seed: int
    #: Hashes of its full blocks, with what tells them from others' of equal tokens.
    block_hashes: BlockHashes = field(default_factory=BlockHashes)
    status: SequenceStatus = SequenceStatus.WAITING
    #: Tokens whose KV is in the cache after the step being run.
    num_computed_tokens: int = 0
    #: Of these, when it last started, tokens after its cached prefix that a KV connector loads.
    num_external_tokens: int = 0
    #: Prompt tokens that a prefix hit saved, when first scheduled.
    num_cached_tokens: int = 0
    #: Prompt tokens that needn't be computed or whose computation has been counted.
    num_prompt_counted: int = 0
    #: Output tokens that the client had before this replica took over; they aren't sent again.
    num_resumed_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    timeline: FlightRecord = field(default_factory=FlightRecord)
    first_scheduled_at: float = 0.0
    first_token_at: float = 0.0
    #: Whether it's counted how many tokens steps in flight sample.
    counts_placeholders: bool = False
    #: Tokens that it was to compute when it was queued last.
    num_queued_tokens: int = 0
    #: How many tokens after the known ones the steps being run will sample.
    num_placeholders: int = 0
    #: Must run in steps of its own until it brings a token, to find out who is to blame: for a step
    #: that failed, or for a replica that died over one.
    isolated: bool = False

    @property
    def cache_namespace(self) -> str:
        """See `EngineRequest`."""
        return self.request.message.cache_namespace

    @property
    def tenant(self) -> str:
        """See `EngineRequest`."""
        return self.request.message.tenant

    @property
    def prefilled(self) -> bool:
        """See `EngineRequest`."""
        return self.request.message.prefilled

    @property
    def kv_peer(self) -> str:
        """See `EngineRequest`."""
        return self.request.message.kv_peer

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def age_ms(self) -> int:
        """Milliseconds since its request came."""
        return int((time.time() - self.request.arrival_time) * 1000)

    @property
    def ends_in_flight(self) -> bool:
        """Whether a token that is still being sampled is the last one by length."""
        if not self.num_placeholders:
            return False
        return self.num_output_tokens + self.num_placeholders >= self.max_output_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether every prompt position's logits are needed and not all delivered yet."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < (
            self.num_prompt_tokens
        )

    @property
    def media(self) -> list[EncoderItem]:
        """See `Request`."""
        return self.request.media

    @property
    def encoder_key(self) -> bytes:
        """Key of the states that it attends to; b"": its model has no encoder for them."""
        entry = self.request.encoder_input
        return b"" if entry is None else entry.key

    @property
    def lora_name(self) -> str | None:
        """The adapter as its client called it; None: the model alone."""
        adapter = self.request.message.adapter
        return None if adapter is None else adapter.name

    @property
    def reads_cache(self) -> bool:
        """Whether its prompt may begin with cached blocks: nothing is wanted of those tokens."""
        pooling = self.request.message.pooling
        return not self.wants_prompt_logprobs and (pooling is None or not pooling.by_token)

    @property
    def finished(self) -> bool:
        """Whether it has left the engine."""
        return self.status is SequenceStatus.FINISHED


@dataclass(slots=True, eq=False)
class Request:
    """A request and its sequences."""

    message: EngineRequest
    sequences: list[Sequence] = field(default_factory=list)
    arrival_time: float = 0.0
    #: Vectors in the place of the prompt ids' embeddings.
    encoder_inputs: list[EncoderInput] = field(default_factory=list)
    #: Its pictures, once they are there, in the order of their positions.
    media: list[EncoderItem] = field(default_factory=list)
    #: What the encoder of a model with cross attention reads.
    encoder_input: EncoderItem | None = None
    #: Handle of the caller's functions on logits.
    logits_processors: int | None = None
    #: Output tokens that may still come, over all outputs; None: no cap.
    remaining_tokens: int | None = None
    #: Tokens that it may hold, where its adapter brings some; 0: the model's. Known once the
    #: adapter is there.
    vocab_size: int = 0
    #: Called when the last sequence has left; the service acknowledges the inbox entry then.
    on_done: Callable[[], None] | None = None

    @property
    def request_id(self) -> str:
        """The id that outputs carry."""
        return self.message.request_id

    @property
    def sampling(self) -> SamplingParams:
        """How to choose tokens, as data: without the caller's functions."""
        params = self.message.sampling
        if params.logits_processors is None:
            return params
        return msgspec.structs.replace(params, logits_processors=None)

    @property
    def is_beam_search(self) -> bool:
        """Whether its sequences are the beams of one search."""
        return self.message.sampling.use_beam_search

    @property
    def attachment_handles(self) -> list[int]:
        """What the executor holds for it."""
        handles = [vectors.handle for vectors in self.encoder_inputs]
        handles += {entry.handle for entry in self.media}
        if self.encoder_input is not None:
            handles.append(self.encoder_input.handle)
        if self.logits_processors is not None:
            handles.append(self.logits_processors)
        return handles

    @property
    def priority(self) -> int:
        """Smaller runs earlier."""
        return self.message.priority

    @property
    def finished(self) -> bool:
        """Whether all sequences have left."""
        return all(sequence.finished for sequence in self.sequences)

    def clear_sequences(self) -> None:
        """Its sequences have left, and nobody asks for them any more.

        They know their request: with this neither waits for the collector, which would look at
        all others to find them, for as long as some steps take.
        """
        self.sequences = []
