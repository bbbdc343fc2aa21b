"""`ModelShard`: one rank's share of a decoder.

Each rank has some attention heads with their keys and values, and some columns in the middle of
each MLP and expert. The layers after these gather their inputs and are split by outputs, which are
gathered, not added up: each sum is computed by one rank, and equals the sum without ranks bitwise.
Tables are split by tokens. All ranks compute norms and the residual, and also attention if its
heads depend on each other; then only the linear layers around it are split.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.contract.errors import ConfigError
from engine.distributed.expert_placement import assign_experts
from engine.distributed.parallel_state import CONTEXT_PARAM, PIPELINE_PARAM, TENSOR_PARAM
from engine.models.decoder_spec import DecoderSpec, MambaSpec
from kernels.interface import RankGroup

log = logging.getLogger(__name__)

PARAM = TENSOR_PARAM
#: Weights with enough rows are split at multiples of this, since quantized formats pack as many
#: rows together.
_ROW_MULTIPLE = 32


def split_evenly(count: int, size: int) -> tuple[int, ...]:
    """Return [size + 1], where each rank's part of `count` rows begins, and where the last ends."""
    unit = _ROW_MULTIPLE if count >= _ROW_MULTIPLE * size else 1
    units = -(-count // unit)
    return tuple(min(count, units * rank // size * unit) for rank in range(size + 1))


@dataclass(frozen=True, slots=True)
class ExpertShard:
    """This rank's experts in each layer.

    Attributes:
        ranks: the group.
        num_redundant: the number of redundant copies of experts in each layer.
        row_ranks: as many consecutive ranks have the same tokens, others their own; 0: all have the
            same ones.
    """

    ranks: RankGroup
    num_redundant: int = 0
    row_ranks: int = 0

    def owners(self, count: int) -> list[tuple[int, ...]]:
        """Return the ranks with each of `count` experts before any is moved."""
        size = self.ranks.size
        if self.num_redundant:
            return assign_experts([0] * count, size, self.num_redundant)
        return [(((expert + 1) * size - 1) // count,) for expert in range(count)]


class ModelShard:
    """This rank's share of a model.

    Attributes:
        ranks: the group.
        full_spec: the spec of the model.
        spec: the spec of this rank's layers, with its heads and its part of the MLP.
        splits_heads: whether each rank has some of the heads; otherwise each has all heads.
        splits_states: whether each rank has some heads of states; otherwise each has all of them.
        kv_ranks: the group if each rank has some tokens of a KV block; None if each has all of its
            heads' KV cache.
    """

    def __init__(self, spec: DecoderSpec, ranks: RankGroup, *, deals_tokens: bool = False) -> None:
        """`deals_tokens`: have `kv_ranks`. Raises `ConfigError` for a model that can't be split."""
        self.ranks, size = ranks, ranks.size
        self.kv_ranks = ranks if deals_tokens else None
        if deals_tokens:
            _check_deals_tokens(spec, size)
        if spec.altup is not None:
            raise ConfigError(
                f"{PARAM}={size} can't be used: an MLP of {spec.architecture} reads the mean of "
                "all its gates. Leave it out, and run more replicas.",
                param=PARAM,
            )
        self.full_spec = spec
        self.splits_heads = not deals_tokens and splits_heads(spec, size)
        if not (self.splits_heads or deals_tokens) and ranks.rank == 0:
            log.warning(
                "Each of %d ranks computes all heads of %s, and has all of its KV cache.",
                size, spec.architecture,
            )  # fmt: skip
        self.splits_states = splits_states(spec, size)
        inner = self.local_slice(split_evenly(spec.intermediate_size, size))
        self.spec = replace(spec, intermediate_size=inner.stop - inner.start)
        if self.splits_heads:
            num_heads, first = spec.num_heads // size, spec.num_heads // size * ranks.rank
            self.spec = replace(
                self.spec,
                num_heads=num_heads,
                num_kv_heads=max(1, spec.num_kv_heads // size),
                alibi_slopes=spec.alibi_slopes and spec.alibi_slopes[first : first + num_heads],
            )
        if (states := spec.states) is not None and self.splits_states:
            num_heads, num_key_heads = states.num_heads // size, states.num_key_heads // size
            states = replace(states, num_heads=num_heads, num_key_heads=num_key_heads)
            self.spec = replace(self.spec, states=states)

    def head_starts(self, head_size: int) -> tuple[int, ...] | None:
        """Return [size + 1], where each rank's outputs of attention begin; None if each has all.

        `head_size`: the number of a head's outputs.
        """
        if not self.splits_heads:
            return None
        columns = self.spec.num_heads * head_size
        return tuple(columns * rank for rank in range(self.ranks.size + 1))

    def head_rows(self, head_size: int) -> list[range] | None:
        """Return this rank's rows of a weight with `head_size` rows per query head; None if heads
        aren't split.
        """
        starts = self.head_starts(head_size)
        if starts is None:
            return None
        rows = self.local_slice(starts)
        return [range(rows.start, rows.stop)]

    def state_rows(self, sizes_of: Callable[[MambaSpec], Sequence[int]]) -> list[range] | None:
        """Return this rank's rows of a layer with a state; None if states aren't split.

        `sizes_of`: the sizes of the rows' parts. A part that isn't smaller in a rank is the same in
        all.
        """
        full, local_spec = self.full_spec.states, self.spec.states
        if full is None or local_spec is None or not self.splits_states:
            return None
        rows, above = [], 0
        for size, local in zip(sizes_of(full), sizes_of(local_spec), strict=True):
            first = above if local == size else above + local * self.ranks.rank
            rows.append(range(first, first + local))
            above += size
        return rows

    def state_linear_rows(self, slot: str) -> list[range] | None:
        """Return this rank's rows of a linear layer of a state, by its slot in
        `StateDescription.linears`; None for all rows.
        """
        sizes_of = _STATE_LINEARS.get(slot)
        return None if sizes_of is None else self.state_rows(sizes_of)

    def inner(self, columns: int) -> tuple[int, ...]:
        """Return where each rank's columns begin in the middle of an MLP or expert."""
        return split_evenly(columns, self.ranks.size)

    @property
    def head_range(self) -> slice:
        """This rank's query heads."""
        first = self.spec.num_heads * self.ranks.rank if self.splits_heads else 0
        return slice(first, first + self.spec.num_heads)

    @property
    def kv_head_range(self) -> slice:
        """This rank's KV heads. With fewer heads than ranks, several ranks have the same."""
        first = 0
        if self.splits_heads:
            first = self.full_spec.num_kv_heads * self.ranks.rank // self.ranks.size
        return slice(first, first + self.spec.num_kv_heads)

    @property
    def qkv_rows(self) -> list[range] | None:
        """This rank's rows of the projection to queries, keys and values; None if heads aren't
        split, or all are needed for a norm over them.
        """
        return None if self.full_spec.qk_norm == "rms_full" else self.qkv_columns

    @property
    def qkv_columns(self) -> list[range] | None:
        """This rank's part of stacked queries, keys and values; None if heads aren't split."""
        full, local, rank = self.full_spec, self.spec, self.ranks.rank
        if not self.splits_heads:
            return None
        width = 2 if full.attention_output_gate else 1  # each query is followed by its gate
        query = width * local.q_size * rank
        key = width * full.q_size + self.kv_head_range.start * full.head_dim
        value = key + full.kv_size
        return [
            range(query, query + width * local.q_size),
            range(key, key + local.kv_size),
            range(value, value + local.kv_size),
        ]

    def up_rows(self, inner: int, gated: bool) -> list[range]:
        """Return this rank's rows of gate over up, of `inner` rows each, or of up alone."""
        local_rows = self.local_slice(self.inner(inner))
        parts = (0, inner) if gated else (0,)
        return [range(part + local_rows.start, part + local_rows.stop) for part in parts]

    def outputs(self, rows: int) -> tuple[int, ...]:
        """Return where each rank's rows of a weight with `rows` rows begin."""
        return split_evenly(rows, self.ranks.size)

    def local_slice(self, starts: Sequence[int]) -> slice:
        """Return this rank's part."""
        return slice(starts[self.ranks.rank], starts[self.ranks.rank + 1])


#: By slot the parts of a linear layer's rows. Inputs and rates of "delta" are by key head.
_STATE_LINEARS: dict[str, Callable[[MambaSpec], Sequence[int]]] = {
    "state_in": lambda of: (of.input_rows,) if of.kind == "delta" else of.input_sizes,
    "state_rates": lambda of: (of.keys if of.kind == "kda" else 2 * of.num_heads,),
    "state_gates": lambda of: (of.values,),
}


def splits_heads(spec: DecoderSpec, size: int) -> bool:
    """Return whether heads can be split: they are independent and their number is divisible."""
    couples_heads = (
        spec.shared is not None
        or spec.sparse is not None
        or spec.cross is not None
        or spec.kv_sources
    )
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    divides = heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
    return divides and not couples_heads


def splits_states(spec: DecoderSpec, size: int) -> bool:
    """Return whether states can be split, each key head with its heads: there are enough, and
    neither a projection nor a norm joins them.
    """
    states = spec.states
    if states is None or states.kind not in ("mamba2", "delta", "kda"):
        return False
    return states.num_key_heads % size == 0


def _check_deals_tokens(spec: DecoderSpec, size: int) -> None:
    if spec.cross is not None or (spec.latents is not None and spec.latents.index is not None):
        reads = "an encoder's states" if spec.cross is not None else "tokens that an index chooses"
        raise ConfigError(
            f"{CONTEXT_PARAM} can't be used: {spec.architecture} attends to {reads}, which "
            f"each of {size} ranks needs whole. Leave it out.",
            param=CONTEXT_PARAM,
        )


def num_kv_copies(spec: DecoderSpec, size: int) -> int:
    """Return the number of ranks with a copy of the same keys."""
    return max(1, size // spec.num_kv_heads) if splits_heads(spec, size) else size


def num_state_copies(spec: DecoderSpec, size: int) -> int:
    """Return the number of ranks with a copy of the same states."""
    return 1 if splits_states(spec, size) else size


def check_stages(spec: DecoderSpec, size: int) -> None:
    """Raise `ConfigError` for a model that can't be split into stages."""
    if spec.cross is not None:
        raise ConfigError(
            f"{PIPELINE_PARAM}={size} can't be used: {spec.architecture} has an encoder, which "
            "can't be in one stage of several. Leave it out, and run more replicas.",
            param=PIPELINE_PARAM,
        )
    if spec.shared is not None or spec.altup is not None:
        raise ConfigError(
            f"{PIPELINE_PARAM}={size} can't be used: all layers of {spec.architecture} read the "
            "embeddings. Leave it out, and run more replicas.",
            param=PIPELINE_PARAM,
        )
