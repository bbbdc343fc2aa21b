"""What passes between scheduler and executor for one step: plan, grammar bitmasks and result.

The plan is a diff: a sequence is described in full when it starts or resumes; afterwards only its
new blocks and the number of tokens to compute. Plans, bitmasks and results are msgspec structs, so
that they can cross processes. Vectors and a caller's functions can't: they are attached to the
executor once and named by handle (`Executor.attach`).
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

    Everything longer is a chunk of a prompt (or of tokens computed again after a preemption). Works
    elementwise on arrays.
    """
    return count == 1 + num_drafts  # type: ignore[return-value]


class EncoderInput(msgspec.Struct, frozen=True):
    """Vectors that replace the embeddings of some of a prompt's tokens.

    Attributes:
        start: the first of these tokens, by its position in the prompt.
        count: number of these tokens.
        handle: float32 [count, hidden], see `Executor.attach`; -1: an encoder's output, by its key.
        key: of the encoder's output in the worker's cache.
        offset: the first of its vectors that is meant.
        grid, time_interval: see `MediaItem`.
        bidirectional: whether its tokens see each other, so that a step computes all or none.
    """

    start: int
    count: int
    handle: int = -1
    key: bytes = b""
    offset: int = 0
    grid: tuple[int, ...] = ()
    time_interval: float = 1.0
    bidirectional: bool = False


class EncodeTask(msgspec.Struct, frozen=True):
    """A picture or a window of sound for the encoder.

    Attributes:
        key: under which the worker keeps the vectors.
        kind: as in `MediaItem`.
        handle: what the encoder reads, see `Executor.attach`.
        seq_id: the sequence that starts with it, where its states go to blocks; else -1.
        block_ids: where their keys and values go, for cross attention; []: the worker keeps them.
        tenant, cache_namespace: of the request that needs it first.
        adapter: digest of the adapter that changes the encoder; "": none does.
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
    #: Block tables, one a KV cache group; their lengths may differ.
    block_ids: list[list[int]]
    #: Without `logits_processors`, which are functions.
    sampling: SamplingParams
    seed: int
    #: Length of the prompt logprobs already delivered, or -1 when none are wanted.
    prompt_logprobs_from: int = -1
    #: Digest of its adapter (`AdapterRef`); "": the model alone.
    adapter: str = ""
    #: In the order of their positions; they don't overlap.
    encoder_inputs: list[EncoderInput] = msgspec.field(default_factory=list)
    #: Handle of the caller's functions on logits; offline only.
    logits_processors: int | None = None
    #: Set when the prompt is to be pooled, not continued.
    pooling: PoolingParams | None = None


class RewoundSequence(msgspec.Struct, frozen=True):
    """A sequence that the worker has, and whose last tokens were replaced.

    Attributes:
        seq_id: the sequence.
        num_kept_tokens: number of first tokens that are unchanged; at least the prompt.
        token_ids: tokens after them.
        num_computed_tokens: tokens whose KV is valid.
    """

    seq_id: int
    num_kept_tokens: int
    token_ids: list[int]
    num_computed_tokens: int


class StepPlan(msgspec.Struct, omit_defaults=True):
    """One step's work, a row a sequence.

    Row i is the sequence `seq_ids[i]`. It computes `num_scheduled[i]` tokens (>= 1), the last
    `len(drafts[seq_ids[i]])` of which are drafts, and wants a token sampled at its last
    `num_samples[i]` positions: 0 within a prompt, else one more than it has drafts.
    """

    step: int
    seq_ids: list[int] = msgspec.field(default_factory=list)
    num_scheduled: list[int] = msgspec.field(default_factory=list)
    num_samples: list[int] = msgspec.field(default_factory=list)
    #: seq_id -> drafts: guesses at the tokens that follow its last one.
    drafts: dict[int, list[int]] = msgspec.field(default_factory=dict)
    new: list[NewSequence] = msgspec.field(default_factory=list)
    #: (seq_id, block ids by KV cache group) appended to the block tables of sequences that the
    #: worker has. Blocks that leave a window aren't listed: no kernel reads them any more.
    new_blocks: list[tuple[int, list[list[int]]]] = msgspec.field(default_factory=list)
    #: Finished, aborted or preempted since the last step: the worker removes them first.
    removed: list[int] = msgspec.field(default_factory=list)
    #: (seq_id, token) that sequences of the worker got without sampling it. Before `new`.
    appended: list[tuple[int, int]] = msgspec.field(default_factory=list)
    #: Sequences of a draft model whose drafts were checked. After `removed`.
    rewound: list[RewoundSequence] = msgspec.field(default_factory=list)
    #: Sequences of the step that get no drafts any more: draft heads needn't follow them.
    untracked: list[int] = msgspec.field(default_factory=list)
    #: Encoder outputs that the worker no longer keeps; before `encode`.
    dropped_encodings: list[bytes] = msgspec.field(default_factory=list)
    #: What the encoder reads before the step's tokens are computed.
    encode: list[EncodeTask] = msgspec.field(default_factory=list)
    #: The KV connector's part, as MessagePack; see `KVConnectorBase.build_connector_meta`.
    kv_meta: bytes = b""
    #: (source, target) of blocks of states, copied in this order before anything is computed.
    block_copies: list[tuple[int, int]] = msgspec.field(default_factory=list)
    #: (seq_id, number of tokens, block): the sequence's state after so many of its tokens, some of
    #: which this step computes, is kept in this block too. A sequence's are in ascending order.
    checkpoints: list[tuple[int, int, int]] = msgspec.field(default_factory=list)
    #: A `GrammarOutput` follows, made while the model runs; sampling waits for it.
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
    """Which tokens a step's rows may get, for those that follow a grammar.

    Attributes:
        step: whose rows.
        seq_ids: sequences, in the order of the rows of `bits`; one that has drafts comes once for
            its newest token and then once for each draft that it may follow.
        bits: int32 [len(seq_ids), words], little-endian, row after row; bit t % 32 of word t // 32
            is set where token t may come.
        eos_only_sequences: rows that nothing but EOS can follow: it comes whatever else the
        request says.
        errors: sequence -> why its grammar failed; its row forbids nothing.
        failure: why there are no masks at all; the step fails.
    """

    step: int
    seq_ids: list[int] = msgspec.field(default_factory=list)
    bits: bytes = b""
    eos_only_sequences: list[int] = msgspec.field(default_factory=list)
    errors: dict[int, str] = msgspec.field(default_factory=dict)
    failure: str = ""


class StepResult(msgspec.Struct, omit_defaults=True):
    """What the step sampled, in the order of `StepPlan.seq_ids`.

    `token_ids[i]` are the tokens that sequence i got, in order: none where it still has prompt to
    compute, more than one where drafts held.
    """

    token_ids: list[list[int]]
    #: By row; in a row one entry a token.
    logprobs: list[list[TokenLogprobs] | None] | None = None
    #: seq_id -> entries for the prompt positions that this step computed.
    prompt_logprobs: dict[int, list[TokenLogprobs]] = msgspec.field(default_factory=dict)
    #: seq_id -> result of a prompt that this step completed, little-endian float32.
    pooled: dict[int, bytes] = msgspec.field(default_factory=dict)
    #: seq_id -> a beam's likeliest next tokens, best first. Its entry of `token_ids` is empty.
    candidates: dict[int, TokenLogprobs] = msgspec.field(default_factory=dict)
    #: seq_id -> why this sequence alone failed (NaN logits, say).
    errors: dict[int, str] = msgspec.field(default_factory=dict)
    #: Seconds that went into following the step for heads, which nobody has asked for drafts yet.
    tracking_seconds: float = 0.0
    #: Seconds in the model's forward pass and in all of the worker, where they are measured
    #: (`collect_detailed_traces`).
    forward_seconds: float = 0.0
    execute_seconds: float = 0.0

    @classmethod
    def empty(cls, num_rows: int) -> StepResult:
        """No token for any of so many rows."""
        return cls([[] for _ in range(num_rows)])
