"""The native encoder: BERT and its relatives, described by `EncoderSpec`.

Sequences of a step lie one after another, without padding. There is no KV cache: a prompt is
computed whole in one step. Activations are float32 whatever the weights' dtype is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from engine.kv_cache.kv_cache_config import KVCacheConfig
from engine.models.encoders.encoder_spec import EncoderSpec
from engine.models.forward_context import AttentionMetadata
from engine.models.layers.linear import FusedLinear, LinearPart
from engine.models.layers.moe import Weights
from engine.models.layers.norm import LayerNorm, NoNorm, Norm, RMSNorm, Transform, chain
from engine.models.lora import LoraContext, LoraLinear
from engine.models.relative_position import logarithmic_bucket
from engine.models.rotary_embedding import RopeSpec, cos_sin_table
from engine.models.supports_lora import SupportsLoRA
from engine.quantization.packing import DenseSource, LinearPacker
from kernels import KernelSet, LinearLayer
from kernels.interface import ActivationSpec
from kernels.layers import gated_activation
from kernels.tensors import to_device


class LengthBatches:
    """The sequences of one step, sorted by length: those of one length are one dense batch.

    Args:
        query_start_loc: int32 [num_seqs + 1], on the host, where each sequence's tokens begin.
        device: of what is to be sorted.

    Attributes:
        groups: (length, first token, end) of the sequences of each length, after sorting.
    """

    def __init__(self, query_start_loc: Tensor, device: torch.device) -> None:
        self._device, starts = device, query_start_loc.tolist()
        by_length: dict[int, list[int]] = {}
        for start, end in pairwise(starts):
            by_length.setdefault(end - start, []).append(start)
        self.groups: list[tuple[int, int, int]] = []
        indices, first = [], 0
        for length, begins in sorted(by_length.items()):
            indices.append((torch.tensor(begins)[:, None] + torch.arange(length)).flatten())
            self.groups.append((length, first, first + length * len(begins)))
            first += length * len(begins)
        # Of one length they lie as they are needed.
        self._order = to_device(torch.cat(indices), device) if len(indices) > 1 else None

    def sorted(self, values: Tensor) -> Tensor:
        """[num_tokens, ...] in the order of the groups."""
        return values if self._order is None else values[self._order]

    def sorted_positions(self, count: int) -> Tensor:
        """int64 [count]: where each of the step's tokens stands among the sorted ones."""
        return self.restored(torch.arange(count, device=self._device))

    def restored(self, values: Tensor) -> Tensor:
        """The sorted rows in the step's order again."""
        if self._order is None:
            return values
        return torch.empty_like(values).index_copy_(0, self._order, values)


@dataclass(slots=True, kw_only=True)
class BidirectionalAttention:
    """One layer's attention: every token sees its whole sequence, or what is near.

    Attributes:
        project: hidden states to queries, keys and values side by side: [T, 3 q].
        output: what follows attention: [T, q] -> [T, hidden].
        cos_sin: rotary table float32 [max_position, head_dim], None: no rotation.
        reach: tokens at most this far away are seen, 0 for all.
        bias_table: float32 [buckets, heads], biases by relative position, or None.
        max_distance: see `relative_bucket`.
        scale: of q.k with a `bias_table`; None: 1 / sqrt(head_dim).
    """

    ops: KernelSet
    project: Transform
    output: Transform
    num_heads: int
    head_dim: int
    cos_sin: Tensor | None = None
    reach: int = 0
    bias_table: Tensor | None = None
    max_distance: int = 128
    scale: float | None = None

    def __call__(self, x: Tensor, positions: Tensor, sequences: LengthBatches) -> Tensor:
        """[T, hidden] of the same; tokens are sorted as in `sequences`."""
        qkv = self.project(x).unflatten(-1, (3, self.num_heads, self.head_dim))
        if self.cos_sin is not None:
            rotated = _rotated(qkv[:, :2], self.cos_sin[positions]).to(qkv.dtype)
            qkv = torch.cat((rotated, qkv[:, 2:]), dim=1)
        out = [
            self._attend(qkv[first:end].unflatten(0, (-1, length)), length)
            for length, first, end in sequences.groups
        ]
        return self.output((torch.cat(out) if len(out) > 1 else out[0]).flatten(1))

    def _attend(self, qkv: Tensor, length: int) -> Tensor:
        """[n, L, 3, heads, head_dim] -> [n * L, heads, head_dim]."""
        if self.bias_table is None:
            q, k, v = qkv.flatten(0, 1).unbind(1)
            return self.ops.encoder_attention(q, k, v, length, reach=self.reach)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        bias = self._bias(self.bias_table, length).to(q.dtype)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, scale=self.scale
        )
        return out.transpose(1, 2).flatten(0, 1)

    def _bias(self, table: Tensor, length: int) -> Tensor:
        """[heads, L, L]: the bias of the scores."""
        positions = torch.arange(length, device=table.device)
        distance = positions[None, :] - positions[:, None]
        return table[relative_bucket(distance, len(table), self.max_distance)].movedim(-1, 0)


def relative_bucket(distance: Tensor, buckets: int, max_distance: int = 128) -> Tensor:
    """T5's buckets of key minus query position (arXiv 1910.10683): half of them for later keys."""
    half = buckets // 2
    return logarithmic_bucket(distance.abs(), half // 2, half, max_distance) + half * (distance > 0)


def _rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x [T, 2, heads, D] rotated as two halves by cos_sin [T, D]."""
    cos, sin = cos_sin[:, None, None, :].chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@dataclass(slots=True)
class EncoderLayer:
    """Attention and MLP, with norms after the residual ("post") or before ("pre")."""

    attention: BidirectionalAttention
    attention_norm: Norm
    mlp: Transform
    mlp_norm: Norm
    pre: bool

    def __call__(self, x: Tensor, positions: Tensor, sequences: LengthBatches) -> Tensor:
        """[T, hidden] of the same."""
        if self.pre:
            x = x + self.attention(self.attention_norm(x), positions, sequences)
            return x + self.mlp(self.mlp_norm(x))
        x = self.attention_norm.add_and_norm(self.attention(x, positions, sequences), x)
        return self.mlp_norm.add_and_norm(self.mlp(x), x)


def encoder_linears(spec: EncoderSpec) -> list[dict[str, FusedLinear]]:
    """Each layer's linear layers by the slots that adapters name, by names without the prefix."""
    inner, names = spec.num_heads * spec.head_dim, spec.names
    layers = []
    for index in range(spec.num_layers):
        prefix = names.layer.format(index)

        def linear(
            parts: Sequence[str], rows: int, columns: int, bias: bool, prefix: str = prefix
        ) -> FusedLinear:
            linear_parts = tuple(LinearPart(prefix + name, rows // len(parts)) for name in parts)
            return FusedLinear(parts=linear_parts, columns=columns, bias=bias)

        up = spec.intermediate_size * (2 if spec.gated else 1)
        layers.append(
            {
                "qkv": linear(names.qkv, 3 * inner, spec.hidden_size, spec.qkv_bias),
                "o": linear([names.o], spec.hidden_size, inner, spec.o_bias),
                "up": linear(names.up, up, spec.hidden_size, spec.mlp_bias),
                "down": linear(
                    [names.down], spec.hidden_size, spec.intermediate_size, spec.mlp_bias
                ),
            }
        )
    return layers


class EncoderLoader:
    """Builds layers from weights, one at a time.

    Args:
        dtype: in which linear weights are kept. Norms, biases and tables of positions are float32.
        max_model_len: length of the rotary tables.
        step: says which adapters the rows of a step go through.

    Attributes:
        linears: of each layer, by slot, without adapters.
    """

    def __init__(
        self,
        spec: EncoderSpec,
        ops: KernelSet,
        dtype: torch.dtype,
        max_model_len: int,
        weights: Weights,
        step: LoraContext,
        quantization: str | None,
    ) -> None:
        self._step, self._described = step, encoder_linears(spec)
        self._quantization = quantization
        self.linears: list[dict[str, LinearLayer]] = [{} for _ in self._described]
        self.spec, self.ops, self.dtype, self.weights = spec, ops, dtype, weights
        self._max_model_len = max_model_len
        self._tables: list[tuple[RopeSpec, Tensor]] = []
        embedding_name = f"{spec.names.prefix}{spec.names.embedding}.weight"
        self._prefix = spec.names.prefix if embedding_name in weights else ""
        self._bias_table: Tensor | None = None

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A tensor of the encoder, in the checkpoint's dtype, maybe backed by the mapped file."""
        return self.weights.get(self._prefix + name, shape)

    def vector(self, name: str, *shape: int) -> Tensor:
        """A small tensor of our own, in float32, on the kernels' device."""
        return self.tensor(name, *shape).float().clone().to(self.ops.device)

    def norm(self, name: str) -> Norm:
        """The LayerNorm of this name; "" for none."""
        if not name:
            return NoNorm()
        size = self.spec.hidden_size
        # torch's norm requires its weights to have the dtype of its input.
        norm_dtype = self.ops.activation_dtype(self.dtype)
        if self.spec.norm == "rms":
            return RMSNorm(self.ops, self.vector(f"{name}.weight", size), self.spec.norm_eps)
        bias = self.vector(f"{name}.bias", size).to(norm_dtype) if self.spec.norm_bias else None
        weight = self.vector(f"{name}.weight", size).to(norm_dtype)
        return LayerNorm(size, weight, bias, self.spec.norm_eps)

    def linear(self, index: int, slot: str) -> LinearLayer:
        """A linear layer, whose rows get what their adapters add."""
        described = self._described[index][slot]
        weight = torch.cat(
            [
                self.tensor(f"{part.name}.weight", part.rows, described.columns)
                for part in described.parts
            ]
        )
        biased = described.parts if described.bias else ()
        biases = [self.vector(f"{part.name}.bias", part.rows) for part in biased]
        bias = torch.cat(biases) if biases else None
        packer = LinearPacker([DenseSource(weight)])
        layer = packer.pack(self.ops, bias, self.dtype, self._quantization)
        self.linears[index][slot] = layer
        return LoraLinear(self.ops, layer, (index, slot), self._step)

    def layer(self, index: int) -> EncoderLayer:
        spec, names, prefix = self.spec, self.spec.names, self.spec.names.layer.format(index)
        has_norm = spec.wiring == "post" or spec.first_norm or index > 0
        return EncoderLayer(
            attention=self._attention(index),
            attention_norm=self.norm(prefix + names.attention_norm if has_norm else ""),
            mlp=self._mlp(index),
            mlp_norm=self.norm(prefix + names.mlp_norm),
            pre=spec.wiring == "pre",
        )

    def _attention(self, index: int) -> BidirectionalAttention:
        spec = self.spec
        return BidirectionalAttention(
            ops=self.ops,
            project=self.linear(index, "qkv"),
            output=self.linear(index, "o"),
            num_heads=spec.num_heads,
            head_dim=spec.head_dim,
            cos_sin=self._table(spec.ropes[index]) if spec.ropes else None,
            reach=spec.reach[index] if spec.reach else 0,
            bias_table=self._relative_bias(),
            max_distance=spec.max_distance,
            scale=spec.attention_scale or None,
        )

    def _relative_bias(self) -> Tensor | None:
        """The table of relative position biases, one for all layers."""
        spec = self.spec
        if spec.relative_buckets and self._bias_table is None:
            name = f"{spec.names.relative_bias}.weight"
            self._bias_table = self.vector(name, spec.relative_buckets, spec.num_heads)
        return self._bias_table

    def _table(self, rope: RopeSpec) -> Tensor:
        """Return the rotary table, which layers with the same embedding share."""
        for cached_rope, table in self._tables:
            if cached_rope == rope:
                return table
        table = cos_sin_table(rope, self._max_model_len).to(self.ops.device)
        self._tables.append((rope, table))
        return table

    def _mlp(self, index: int) -> Transform:
        spec = self.spec
        act = (
            gated_activation(self.ops, ActivationSpec(spec.activation))
            if spec.gated
            else self.ops.activation(spec.activation)
        )
        return chain(self.linear(index, "up"), act, self.linear(index, "down"))


class NativeEncoder(SupportsLoRA):
    """Bidirectional transformer.

    Args:
        spec: the architecture.
        ops: kernels of the device.
        weight_dtype: in which linear weights and the embedding are kept.
        max_model_len: longest sequence.

    Attributes:
        stateful: no sequence carries anything from step to step.
    """

    stateful = False

    def __init__(
        self,
        spec: EncoderSpec,
        ops: KernelSet,
        weight_dtype: torch.dtype,
        max_model_len: int,
        quantization: str | None = None,
    ) -> None:
        super().__init__()
        self._quantization = quantization
        self.spec = spec
        self.ops = ops
        self.weight_dtype = weight_dtype
        self.max_model_len = max_model_len
        self.layers: list[EncoderLayer] = []
        self._positions: Tensor | None = None
        self._token_types: Tensor | None = None
        self._linears: list[dict[str, LinearLayer]] = []

    def load(
        self,
        weights: Weights,
        progress: Callable[[int, int], None],
        embed: Transform | None = None,
    ) -> None:
        """Read all weights; `progress(done, total)` is called after each layer.

        `embed`: gives the rows of a table that is a decoder's too, by int64 ids [n].
        """
        spec, names = self.spec, self.spec.names
        builder = EncoderLoader(
            spec,
            self.ops,
            self.weight_dtype,
            self.max_model_len,
            weights,
            self._step,
            self._quantization,
        )
        total = spec.num_layers + 1
        width = spec.hidden_size
        self._embed = embed or self._table_rows
        if embed is None:
            embedding = builder.tensor(f"{names.embedding}.weight", spec.vocab_size, width)
            self.embedding = embedding.to(self.weight_dtype).clone().to(self.ops.device)
        if spec.num_positions:
            name = f"{names.positions}.weight"
            self._positions = builder.vector(name, spec.num_positions, width)
        if spec.type_vocab_size:
            name = f"{names.token_types}.weight"
            self._token_types = builder.vector(name, spec.type_vocab_size, width)
        self._embedding_norm: Norm = builder.norm(names.embedding_norm)
        progress(1, total)
        for index in range(spec.num_layers):
            self.layers.append(builder.layer(index))
            progress(index + 2, total)
        self._linears = builder.linears
        self._final_norm: Norm = builder.norm(names.final_norm)

    def lora_linears(self, layer: int) -> Mapping[str, LinearLayer]:
        return self._linears[layer]

    @property
    def _depth(self) -> int:
        return self.spec.num_layers

    def _slot_names(self) -> list[list[str]]:
        return [list(layer) for layer in self._linears]

    @property
    def decode_bytes(self) -> int:
        """Nothing is decoded."""
        return 0

    def allocate_kv(
        self,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        layout: KVCacheConfig | None = None,
    ) -> None:
        """There is no KV cache."""

    def release_kv(self) -> None:
        """There is none to let go."""

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, context: AttentionMetadata, token_types: Tensor | None = None
    ) -> Tensor:
        """Hidden states after the last layer.

        Args:
            token_ids: int64 [num_tokens].
            context: the step's batch; only positions and adapters matter, and query_start_loc, on
                the host.
            token_types: int64 [num_tokens], None for zeros.

        Returns:
            float32 [num_tokens, hidden].
        """
        sequences = LengthBatches(context.query_start_loc, token_ids.device)
        positions = sequences.sorted(context.positions)
        types = None if token_types is None else sequences.sorted(token_types)
        adapters, rows = self._permute_adapters(
            context, lambda: sequences.sorted_positions(len(token_ids))
        )
        ids = sequences.sorted(token_ids)
        x = self._embed(ids).float()
        self._adapt_embedding(x, ids, adapters, rows)
        x = self._positioned(x, positions, types)
        with self._lora_context(adapters, rows):
            for layer in self.layers:
                x = layer(x, positions, sequences)
        return sequences.restored(self._final_norm(x)).float()

    def use_positions(self, table: Tensor) -> None:
        """Add the rows of a table, [length, hidden], to embeddings by position."""
        self._positions = table

    def _table_rows(self, ids: Tensor) -> Tensor:
        return self.embedding[ids]

    def _positioned(self, x: Tensor, positions: Tensor, token_types: Tensor | None) -> Tensor:
        """Embeddings with those of types and positions, normed; x changes."""
        if self.spec.embedding_scale != 1.0:
            x.mul_(self.spec.embedding_scale)
        if self._token_types is not None:
            types = self._token_types
            x.add_(types[0] if token_types is None or len(types) == 1 else types[token_types])
        if self._positions is not None:
            x.add_(self._positions[positions + self.spec.position_offset])
        return self._embedding_norm(x.to(self.ops.activation_dtype(self.weight_dtype)))
