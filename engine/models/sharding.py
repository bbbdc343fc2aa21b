"""`ModelShard`: one rank's share of a decoder.

Each rank has some heads of attention, with their keys and values, and some columns of the MLP's
middle. What the layers behind these give is gathered, not added up: a rank has rows of their
weights, so each sum is computed by one rank, in the order and with the bits that it has without
ranks. Tables are cut by tokens. Norms and the residual are computed by all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.contract.errors import ConfigError
from engine.models.decoder_spec import DecoderSpec
from kernels.interface import RankGroup

PARAM = "tensor_parallel_size"
#: Rows of a weight are cut at multiples of this where there are enough: formats of few bits pack
#: as many together.
_ROW_MULTIPLE = 32


def split_evenly(count: int, size: int) -> tuple[int, ...]:
    """[size + 1]: where each rank's part of `count` rows begins, and where the last one ends."""
    unit = _ROW_MULTIPLE if count >= _ROW_MULTIPLE * size else 1
    units = -(-count // unit)
    return tuple(min(count, units * rank // size * unit) for rank in range(size + 1))


class ModelShard:
    """What of a model is this rank's.

    Attributes:
        ranks: the group.
        spec: the model as this rank's layers are: with its heads and its part of the MLP.
        heads: [size + 1], where each rank's columns of what attention gives begin.
        inner: likewise, of the MLP's middle.
    """

    def __init__(self, spec: DecoderSpec, ranks: RankGroup) -> None:
        """Raises `ConfigError` for a model that can't be cut."""
        check_shardable(spec, ranks.size)
        self.ranks, size = ranks, ranks.size
        self._full = spec
        self.heads = tuple(spec.q_size // size * rank for rank in range(size + 1))
        self.inner = split_evenly(spec.intermediate_size, size)
        num_heads, first = spec.num_heads // size, spec.num_heads // size * ranks.rank
        slopes = spec.alibi_slopes and spec.alibi_slopes[first : first + num_heads]
        self.spec = replace(
            spec,
            num_heads=num_heads,
            num_kv_heads=max(1, spec.num_kv_heads // size),
            intermediate_size=self.inner[ranks.rank + 1] - self.inner[ranks.rank],
            alibi_slopes=slopes,
        )

    @property
    def head_range(self) -> slice:
        """This rank's query heads."""
        first = self.spec.num_heads * self.ranks.rank
        return slice(first, first + self.spec.num_heads)

    @property
    def kv_head_range(self) -> slice:
        """This rank's KV heads. Of fewer than ranks several ranks have the same one."""
        first = self._full.num_kv_heads * self.ranks.rank // self.ranks.size
        return slice(first, first + self.spec.num_kv_heads)

    @property
    def qkv_rows(self) -> list[range]:
        """This rank's rows of queries, keys and values over each other."""
        full, local, rank = self._full, self.spec, self.ranks.rank
        query = local.q_size * rank
        key = full.q_size + self.kv_head_range.start * full.head_dim
        value = key + full.kv_size
        return [
            range(query, query + local.q_size),
            range(key, key + local.kv_size),
            range(value, value + local.kv_size),
        ]

    @property
    def up_rows(self) -> list[range]:
        """This rank's rows of gate and up over each other, or of up alone."""
        first, end = self.inner[self.ranks.rank : self.ranks.rank + 2]
        inner = self._full.intermediate_size
        parts = (0, inner) if self._full.gated else (0,)
        return [range(part + first, part + end) for part in parts]

    def outputs(self, rows: int) -> tuple[int, ...]:
        """Where each rank's rows of a weight of `rows` rows begin."""
        return split_evenly(rows, self.ranks.size)

    def own(self, starts: Sequence[int]) -> slice:
        """This rank's part."""
        return slice(starts[self.ranks.rank], starts[self.ranks.rank + 1])


def check_shardable(spec: DecoderSpec, size: int) -> None:
    """Raise `ConfigError` for a model that can't be cut for `size` ranks."""
    obstacles = {
        "experts": spec.moe is not None,
        "attention over latents": spec.latents is not None,
        "an encoder": spec.cross is not None,
        "layers that carry a state": spec.states is not None,
        "block-sparse attention": spec.sparse is not None,
        "gates in its attention": spec.attention_output_gate,
        "layers with different numbers of KV heads": bool(spec.layer_kv_heads),
        "a norm over all heads": spec.qk_norm == "rms_full",
    }
    for what, applies in obstacles.items():
        if applies:
            raise ConfigError(
                f"{PARAM}={size} can't be used: {spec.architecture} has {what}, which several "
                "ranks can't share. Leave it out, and run more replicas for more throughput.",
                param=PARAM,
            )
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    if heads % size or (kv_heads % size and size % kv_heads):
        raise ConfigError(
            f"{PARAM} must divide the model's {heads} heads, and divide or be divided by its "
            f"{kv_heads} KV heads; got {size}.",
            param=PARAM,
        )
