"""The messages between scheduler and executor for a step: plan, grammar bitmasks and result.

The plan is a diff: a sequence is described in full when it starts or resumes; afterwards only its
new blocks and its number of tokens are sent. Plans, bitmasks and results are msgspec structs, so
they can be sent to other processes. Vectors and a caller's functions can't: they are attached to
the executor once and referred to by handle (`Executor.attach`).
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from engine.contract.messages import TokenLogprobs
from engine.contract.pooling_params import PoolingParams
from engine.contract.sampling_params import SamplingParams

Count = TypeVar("Count")


def is_decode(count: Count, num_drafts: int = 0) -> Count:
    """Whether a row that computes `count` tokens decodes: its last token and the drafts after it.

    Longer rows are chunks of a prompt (or of tokens recomputed after a preemption). Works
    elementwise on arrays.
    """
    return count == 1 + num_drafts  # type: ignore[return-value]


class EncoderInput(msgspec.Struct, frozen=True):
    """Vectors that replace the embeddings of some of a prompt's tokens.

    Attributes:
        start: position in the prompt of the first of these tokens.
        count: number of these tokens.
        handle: float32 [count, hidden], see `Executor.attach`; -1: an encoder's output, by its key.
        key: key of the encoder's output in the worker's cache.
        offset: index of the first of its vectors to use.
        grid, time_interval: see `MediaItem`.
        retained: cells of the grid that have a vector, bool as bytes; b"": all.
        bidirectional: whether its tokens attend to each other, so that a step computes all or none.
    """

    start: int
    count: int
    handle: int = -1
    key: bytes = b""
    offset: int = 0
    grid: tuple[int, ...] = ()
    time_interval: float = 1.0
    bidirectional: bool = False
    retained: bytes = b""


class EncodeTask(msgspec.Struct, frozen=True):
    """A picture or a window of sound for the encoder.

    Attributes:
        key: key under which the worker keeps the vectors.
        kind: as in `MediaItem`.
        handle: the encoder's input, see `Executor.attach`.
        seq_id: the sequence that starts with it, if its states are written to blocks; else -1.
        block_ids: blocks for its keys and values (cross attention); []: the worker keeps vectors.
        tenant, cache_namespace: of the first request that needs it.
        adapter: digest of the adapter that changes the encoder; "": none.
    """

    key: bytes
    kind: str
    handle: int
    seq_id: int = -1
    block_ids: list[int] = msgspec.field(default_factory=list)
    tenant: str = ""
    cache_namespace: str = ""
    adapter: str = ""


class NewSequence(msgspec.Struct, omit_defaults=True):
    """A sequence that the worker doesn't have: new, or resumed after a preemption."""

    seq_id: int
    #: [num_tokens] prompt and output so far.
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    #: Block tables, one per KV cache group; their lengths may differ.
    block_ids: list[list[int]]
    #: Without `logits_processors`, which are functions.
    sampling: SamplingParams
    seed: int
    #: Number of prompt logprobs already delivered; -1: none are requested.
    prompt_logprobs_from: int = -1
    #: Digest of its adapter (`AdapterRef`); "": none.
    adapter: str = ""
    #: In the order of their positions; they don't overlap.
    encoder_inputs: list[EncoderInput] = msgspec.field(default_factory=list)
    #: Number of encoder states that it attends to.
    num_encoder_states: int = 0
    #: Handle of the caller's logits processors; offline only.
    logits_processors: int | None = None
    #: Set if the prompt is to be pooled; then nothing is generated.
    pooling: PoolingParams | None = None


class RewoundSequence(msgspec.Struct, frozen=True):
    """A sequence that the worker has and whose last tokens were replaced.

    Attributes:
        seq_id: the sequence.
        num_kept_tokens: number of first tokens that are unchanged; includes the prompt.
        token_ids: tokens after them.
        num_computed_tokens: tokens whose KV is valid.
    """

    seq_id: int
    num_kept_tokens: int
    token_ids: list[int]
    num_computed_tokens: int


class StepPlan(msgspec.Struct, omit_defaults=True):
    """One step's work, one row per sequence.

    Row i is the sequence `seq_ids[i]`. It computes `num_scheduled[i]` tokens (>= 1), the last
    `len(drafts[seq_ids[i]])` of which are drafts. A token is sampled at each of its last
    `num_samples[i]` positions: 0 within a prompt, else one more than it has drafts.
    """

    step: int
    seq_ids: list[int] = msgspec.field(default_factory=list)
    num_scheduled: list[int] = msgspec.field(default_factory=list)
    num_samples: list[int] = msgspec.field(default_factory=list)
    #: seq_id -> drafts: proposed tokens after its last one.
    drafts: dict[int, list[int]] = msgspec.field(default_factory=dict)
    new: list[NewSequence] = msgspec.field(default_factory=list)
    #: (seq_id, block ids by KV cache group) appended to the block tables of sequences that the
    #: worker has. Blocks that leave a window aren't listed: kernels don't read them any more.
    new_blocks: list[tuple[int, list[list[int]]]] = msgspec.field(default_factory=list)
    #: Finished, aborted or preempted since the last step; the worker removes them first.
    removed: list[int] = msgspec.field(default_factory=list)
    #: (seq_id, token) appended to sequences of the worker without sampling. Applied before `new`.
    appended: list[tuple[int, int]] = msgspec.field(default_factory=list)
    #: Sequences of a draft model whose drafts were verified. Applied after `removed`.
    rewound: list[RewoundSequence] = msgspec.field(default_factory=list)
    #: Sequences of the step that get no more drafts: draft heads needn't track them.
    untracked: list[int] = msgspec.field(default_factory=list)
    #: Encoder outputs that the worker must free; before `encode`.
    dropped_encodings: list[bytes] = msgspec.field(default_factory=list)
    #: Encoder inputs to encode before the step's tokens are computed.
    encode: list[EncodeTask] = msgspec.field(default_factory=list)
    #: The KV connector's metadata, as MessagePack; see `KVConnectorBase.build_connector_meta`.
    kv_meta: bytes = b""
    #: (source, target) of state blocks, copied in this order before anything is computed.
    block_copies: list[tuple[int, int]] = msgspec.field(default_factory=list)
    #: (seq_id, number of tokens, block): the sequence's state after that many tokens, some of which
    #: this step computes, is also saved to this block. In ascending order within a sequence.
    checkpoints: list[tuple[int, int, int]] = msgspec.field(default_factory=list)
    #: A `GrammarOutput` follows, computed while the model runs; sampling waits for it.
    awaits_bitmask: bool = False

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the step."""
        return sum(self.num_scheduled)

    @property
    def num_decodes(self) -> int:
        """Number of rows that decode."""
        if not self.drafts:
            return self.num_scheduled.count(1)
        return sum(
            is_decode(count, len(self.drafts.get(seq_id, ())))
            for seq_id, count in zip(self.seq_ids, self.num_scheduled, strict=True)
        )

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of the rows that don't decode."""
        if not self.drafts:
            return sum(self.num_scheduled) - self.num_scheduled.count(1)
        return sum(
            count
            for seq_id, count in zip(self.seq_ids, self.num_scheduled, strict=True)
            if not is_decode(count, len(self.drafts.get(seq_id, ())))
        )


class GrammarOutput(msgspec.Struct, omit_defaults=True):
    """The tokens that a step's rows may get, for sequences with a grammar.

    Attributes:
        step: number of the step.
        seq_ids: sequences, in the order of the rows of `bits`; one with drafts has a row for its
            newest token and then one for each draft that the grammar allows so far.
        bits: int32 [len(seq_ids), words], little-endian, row after row; bit t % 32 of word t // 32
            is set if token t is allowed.
        eos_only_sequences: sequences that only EOS can follow: it is allowed whatever else the
            request says.
        errors: sequence -> why its grammar failed; its row allows all tokens.
        failure: why no bitmask could be computed; the step fails.
    """

    step: int
    seq_ids: list[int] = msgspec.field(default_factory=list)
    bits: bytes = b""
    eos_only_sequences: list[int] = msgspec.field(default_factory=list)
    errors: dict[int, str] = msgspec.field(default_factory=dict)
    failure: str = ""


class StepResult(msgspec.Struct, omit_defaults=True):
    """The tokens that a step sampled, in the order of `StepPlan.seq_ids`.

    `token_ids[i]` are the tokens that sequence i got, in order: none while its prompt isn't
    complete, more than one if drafts were accepted.
    """

    token_ids: list[list[int]]
    #: By row; within a row one entry per token.
    logprobs: list[list[TokenLogprobs] | None] | None = None
    #: seq_id -> entries for the prompt positions that this step computed.
    prompt_logprobs: dict[int, list[TokenLogprobs]] = msgspec.field(default_factory=dict)
    #: seq_id -> result of a prompt that this step completed, little-endian float32.
    pooled: dict[int, bytes] = msgspec.field(default_factory=dict)
    #: seq_id -> a beam's most probable next tokens, best first. Its entry of `token_ids` is empty.
    candidates: dict[int, TokenLogprobs] = msgspec.field(default_factory=dict)
    #: seq_id -> why this sequence alone failed (NaN logits, say).
    errors: dict[int, str] = msgspec.field(default_factory=dict)
    #: Seconds spent on tracking the step for draft heads that haven't been asked for drafts yet.
    tracking_seconds: float = 0.0
    #: Seconds in the model's forward pass and in all of the worker, where they are measured
    #: (`collect_detailed_traces`).
    forward_seconds: float = 0.0
    execute_seconds: float = 0.0

    @classmethod
    def empty(cls, num_rows: int) -> StepResult:
        """A result without tokens for `num_rows` rows."""
        return cls([[] for _ in range(num_rows)])
