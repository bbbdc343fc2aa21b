"""A request inside the engine, and its sequences: one per output."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

from engine.contract.messages import EngineRequest, FlightRecord, TokenLogprobs
from engine.contract.sampling_params import SamplingParams
from engine.kv_cache import BlockHashes
from engine.scheduler.encoder_cache import EncoderItem
from engine.scheduler.plan import EncoderInput


class SequenceStatus(enum.Enum):
    """Status of a sequence."""

    #: Its adapter is being loaded or its grammar compiled; not in the scheduler yet.
    WAITING_FOR_ADMISSION = "waiting_outside"
    #: A beam that hasn't started, or has freed its blocks while it waits for other beams; it is in
    #: none of the scheduler's lists.
    PARKED_BEAM = "parked"
    WAITING = "waiting"
    #: A KV connector loads its blocks, which are allocated; it is in none of the scheduler's lists.
    WAITING_FOR_REMOTE_KVS = "waiting_for_remote_kvs"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens of one output of a request, and for how many of them KV is computed.

    There is no prefill or decode state: each step moves `num_computed_tokens` towards `num_tokens`,
    and when they meet the next token is sampled.
    """

    #: Unique in this engine, in order of arrival.
    seq_id: int
    request: Request
    #: Index of the request's output.
    index: int
    #: Prompt, then output; grows by sampling.
    token_ids: list[int]
    num_prompt_tokens: int
    #: Maximum number of output tokens: from max_tokens, the context and the pool.
    max_output_tokens: int
    #: Seed of this output, resolved.
    seed: int
    #: Hashes of its full blocks, including what distinguishes them from others of equal tokens.
    block_hashes: BlockHashes = field(default_factory=BlockHashes)
    status: SequenceStatus = SequenceStatus.WAITING
    #: Tokens whose KV is in the cache after the step being run.
    num_computed_tokens: int = 0
    #: Tokens after its cached prefix that a KV connector loads, when it last started.
    num_external_tokens: int = 0
    #: Whether it has waited for such tokens since it last started.
    kv_awaited: bool = False
    #: The KV connector's, when it has ended.
    kv_transfer_result: dict[str, Any] | None = None
    #: Prompt tokens that were cached when it was first scheduled.
    num_cached_tokens: int = 0
    #: Prompt tokens that needn't be computed, or are counted as computed already.
    num_prompt_counted: int = 0
    finish_reason: str | None = None
    stop_reason: int | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    timeline: FlightRecord = field(default_factory=FlightRecord)
    first_scheduled_at: float = 0.0
    first_token_at: float = 0.0
    #: Whether tokens that steps in flight sample are counted as placeholders.
    counts_placeholders: bool = False
    #: Tokens that it had to compute when it was last queued.
    num_queued_tokens: int = 0
    #: Number of tokens after the known ones that steps in flight will sample.
    num_placeholders: int = 0
    #: Must run in steps of its own until it gets a token, to find the culprit of a failed step or
    #: of a replica's crash.
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
    def request_id(self) -> str:
        """The id of its request, which is made unique for further outputs as in vLLM."""
        request_id = self.request.request_id
        return f"{self.index}_{request_id}" if self.index else request_id

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:
        """The hand-over of its prompt, with vLLM's names; None: there is none. The address is one
        of the model's replicas, whatever the client said.
        """
        message, address = self.request.message, urlsplit(self.kv_peer)
        if not (message.prefilled or message.do_remote_decode):
            return None
        return {
            "do_remote_prefill": message.prefilled,
            "do_remote_decode": message.do_remote_decode,
            "remote_host": address.hostname,
            "remote_port": address.port,
        }

    @property
    def kv_peer(self) -> str:
        """See `EngineRequest`."""
        return self.request.message.kv_peer

    @property
    def num_tokens(self) -> int:
        """Number of known tokens, prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def age_ms(self) -> int:
        """Milliseconds since its request arrived."""
        return int((time.time() - self.request.arrival_time) * 1000)

    @property
    def ends_in_flight(self) -> bool:
        """Whether a token in flight will end it by length."""
        if not self.num_placeholders:
            return False
        return self.num_output_tokens + self.num_placeholders >= self.max_output_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt logprobs were requested and not all are delivered yet."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < (
            self.num_prompt_tokens
        )

    @property
    def media(self) -> list[EncoderItem]:
        """See `Request`."""
        return self.request.media

    @property
    def encoder_key(self) -> bytes:
        """Key of the encoder states that it attends to; b"" without cross attention."""
        entry = self.request.encoder_input
        return b"" if entry is None else entry.key

    @property
    def num_encoder_states(self) -> int:
        """Number of encoder states that it attends to."""
        entry = self.request.encoder_input
        return 0 if entry is None else entry.num_states

    @property
    def lora_name(self) -> str | None:
        """The adapter's name as the client gave it; None: no adapter."""
        adapter = self.request.message.adapter
        return None if adapter is None else adapter.name

    @property
    def reads_cache(self) -> bool:
        """Whether its prompt may start with cached blocks: no results are needed for those
        tokens.
        """
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
    #: Vectors that replace the embeddings of prompt ids.
    encoder_inputs: list[EncoderInput] = field(default_factory=list)
    #: Its pictures, once attached, in the order of their positions.
    media: list[EncoderItem] = field(default_factory=list)
    #: The encoder's input in a model with cross attention.
    encoder_input: EncoderItem | None = None
    #: Handle of the caller's logits processors.
    logits_processors: int | None = None
    #: Remaining output tokens over all outputs; None: no cap.
    remaining_tokens: int | None = None
    #: Size of its vocabulary if its adapter adds tokens; 0: the model's. Known once the adapter is
    #: loaded.
    vocab_size: int = 0
    #: Called when the last sequence has ended; the service acknowledges the inbox entry then.
    on_done: Callable[[], None] | None = None

    @property
    def request_id(self) -> str:
        """The id that its deltas carry."""
        return self.message.request_id

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters as plain data, without the caller's functions."""
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
        """Handles of everything attached to the executor for it."""
        handles = [vectors.handle for vectors in self.encoder_inputs]
        handles += {entry.handle for entry in self.media}
        if self.encoder_input is not None:
            handles.append(self.encoder_input.handle)
        if self.logits_processors is not None:
            handles.append(self.logits_processors)
        return handles

    @property
    def priority(self) -> int:
        """The request's priority; a smaller one is scheduled earlier."""
        return self.message.priority

    @property
    def finished(self) -> bool:
        """Whether all sequences have ended."""
        return all(sequence.finished for sequence in self.sequences)

    def clear_sequences(self) -> None:
        """Break the reference cycle between a finished request and its sequences.

        Otherwise they would stay until the garbage collector runs, which visits all other objects,
        too, and can take as long as some steps.
        """
        self.sequences = []
