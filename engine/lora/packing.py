"""Packs an adapter's matrices into the format that a model's kernels run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.contract.errors import InvalidRequest
from engine.distributed.parallel_state import DATA_PARAM, PIPELINE_PARAM
from engine.lora.adapter import LoRAAdapter, LoRALayer
from engine.lora.layer_delta import AdaptableModel, LayerDeltaBuilder, dora_column_scale, zero_input
from engine.lora.lm_head import LMHeadWithAddedTokens
from engine.lora.merge import merged_dense
from engine.lora.target_modules import TargetModules, TargetSlice
from engine.models.decoder import NativeDecoder
from engine.models.decoder_spec import DecoderSpec
from engine.models.encoders.encoder import NativeEncoder
from engine.models.layers.linear import FusedLinear, LinearPart
from engine.models.layers.norm import Transform
from engine.models.lora import AdapterWeights, EmbeddingLora, HeadLora, LatentLora
from engine.models.sharding import PARAM, ModelShard
from engine.models.supports_lora import AdaptableLinear
from engine.models.vision.family import VisionDecoder
from engine.models.weight_loader import repeat_kv_rows, ungroup_qkv_rows
from engine.pooling.heads import ClassifierHeadFactory
from kernels import LinearLayer
from kernels.lora import HEAD, EmbeddingWeights, LoraSlice, LoraWeights, PackedLora

if TYPE_CHECKING:
    from engine.transformers_backend.model import TransformersModel


#: The slot of the layer that computes each head's keys and values from latents.
LATENT_HEADS = "latent_heads"
#: Linear layers that support adapters in tensor parallelism.
_SHARDED_SLOTS = (
    *("qkv", "o", "up", "down"),
    *("state_in", "state_selection", "state_rates", "state_gates", "state_out"),
)


class TransformersModules(TargetModules):
    """The modules of a model of `transformers`, as one layer whose slots are module names."""

    takes_gguf = False

    def __init__(self, model: TransformersModel) -> None:
        adapted = model.adapted
        self.classifier: dict[str, tuple[int, ...]] = {}
        self.head, self.heads, self.tied = _name(adapted.output), (0, 0), adapted.tied
        self.vision = None
        self.embedding, self.vocab_size, self.hidden_size = "", 0, 0
        if adapted.embedding is not None:
            slot, table = adapted.embedding
            self.embedding = _name(slot)
            self.vocab_size, self.hidden_size = table.weight.shape
        self._targets = {
            _name(slot): TargetSlice(0, slot, 0, *adapted.sizes(slot))
            for slot in adapted.linears
            if slot != adapted.output
        }
        self.layers = [
            {
                target.slot: FusedLinear(
                    parts=(LinearPart(name, target.rows),),
                    columns=target.columns,
                    bias=target.slot in adapted.biased,
                )
                for name, target in self._targets.items()
            }
        ]

    def resolve(self, name: str) -> str | None:
        """See `TargetModules.resolve`: names are those of `transformers`, as in PEFT."""
        is_target = name in self._targets or name in {self.embedding, self.head} - {""}
        return name if is_target else None

    def find_target(self, name: str) -> TargetSlice | None:
        return self._targets.get(name)

    def dense(self, name: str) -> tuple[int, int] | None:
        """See `TargetModules.dense`: None, since there is no classifier's head."""
        return None

    def is_unused(self, name: str) -> bool:
        return False

    def stack(self, name: str) -> None:
        """See `TargetModules.stack`: None; experts in one tensor don't support adapters here."""
        return


def modules_of(model: AdaptableModel, heads: ClassifierHeadFactory | None = None) -> TargetModules:
    """Return the modules of a model; `heads`: creates classifier heads."""
    if isinstance(model, NativeDecoder | NativeEncoder):
        vision = model.encoder.linears if isinstance(model, VisionDecoder) else None
        return TargetModules(_full_spec(model), None if heads is None else heads.shapes, vision)
    return TransformersModules(model)


def _name(slot: str) -> str:
    return slot.replace("/", ".")


def pack_adapter(
    adapter: LoRAAdapter,
    model: AdaptableModel,
    dtype: torch.dtype | None = None,
    heads: ClassifierHeadFactory | None = None,
    modules: TargetModules | None = None,
) -> AdapterWeights:
    """Pack an adapter for a model, on its device, in `dtype` (None: that of its file).

    `heads` creates a classifier's head for adapters that replace it. `modules`: the model's, if
    already known.

    Raises `InvalidRequest` for changes that are valid but not supported for this model.
    """
    native = isinstance(model, NativeDecoder)
    if adapter.vocab_size and not native:
        raise InvalidRequest(
            "Adapters that bring tokens of their own aren't supported for this model.",
            param="modules_to_save",
        )
    shard = _shard_of(model)
    if (num_ranks := _num_ranks(model)) > 1:
        _check_shardable(adapter, num_ranks)
    stage = model.stage if isinstance(model, NativeDecoder) else None
    if stage is not None and not has_only_matrices(adapter):
        raise InvalidRequest(
            "Adapters that change the embedding or the output layer can't be used with "
            f"{PIPELINE_PARAM}={stage.size}: serve them with one stage.",
            param="model",
        )
    packer = AdapterPacker(adapter, model, dtype, modules or modules_of(model))
    layers = [dict(packer.layer(index)) for index in range(packer.num_layers)]
    embedding, head = packer.embedding(), packer.head()
    table = model.lora_table([*layers, packer.ends] if model.lora_slots else layers)
    if shard is not None and table is None:  # the layers would run one by one
        raise _shard_error(num_ranks, f"of {model.spec.architecture}")
    return AdapterWeights(
        digest=adapter.digest,
        layers=layers,
        table=table,
        embedding=embedding,
        head=head,
        classifier=packer.classifier(heads),
        vision=dict(packer.vision()),
        vocab_size=adapter.vocab_size,
        num_bytes=packer.num_bytes,
    )


def has_only_matrices(adapter: LoRAAdapter) -> bool:
    """Whether the adapter changes linear layers only, and not the output layer."""
    other_parts = (adapter.tables, adapter.tokens, adapter.classifier, adapter.dense)
    ends = (adapter.embedding, adapter.head)
    return bool(adapter.modules) and not any(other_parts) and all(end is None for end in ends)


def _shard_of(model: AdaptableModel) -> ModelShard | None:
    """Return a rank's share of the model; None without tensor parallelism."""
    return model.shard if isinstance(model, NativeDecoder) else None


def _num_ranks(model: AdaptableModel) -> int:
    """Return the number of ranks that share the tensors of the model's layers."""
    if isinstance(model, NativeEncoder):
        return 1
    if isinstance(model, NativeDecoder):
        return 1 if model.shard is None else model.shard.ranks.size
    return model.adapted.num_ranks


def _full_spec(model: AdaptableModel) -> Any:
    """Return the complete model's spec, of which this rank may have a part."""
    return model.full_spec if isinstance(model, NativeDecoder) else model.spec


def _check_shardable(adapter: LoRAAdapter, num_ranks: int) -> None:
    """Raise `InvalidRequest` for changes whose packing would need other ranks' weights."""
    if not has_only_matrices(adapter):
        raise _shard_error(num_ranks, "that change the embedding or the output layer")
    for delta in adapter.modules.values():
        if delta.magnitude is not None:
            raise _shard_error(num_ranks, "with DoRA")
        if delta.bias is not None or delta.b_bias is not None:
            raise _shard_error(num_ranks, "with biases")


def _shard_error(num_ranks: int, what: str) -> InvalidRequest:
    return InvalidRequest(
        f"Adapters {what} can't be used with {PARAM}={num_ranks}: serve them with one rank.",
        param="model",
    )


def _has_head_bias(model: NativeDecoder | TransformersModel) -> bool:
    if isinstance(model, NativeDecoder):
        return model.spec.lm_head_bias
    return model.adapted.output in model.adapted.biased


class AdapterPacker:
    """Packs the changes of one adapter."""

    def __init__(
        self,
        adapter: LoRAAdapter,
        model: AdaptableModel,
        dtype: torch.dtype | None,
        modules: TargetModules,
    ) -> None:
        self._adapter, self._model, self._dtype = adapter, model, dtype
        self.modules = modules
        #: Index of this rank's first layer in the model, and number of its layers.
        self._first_layer, self.num_layers = 0, len(modules.layers)
        if isinstance(model, NativeDecoder):
            self._first_layer, self.num_layers = model.first_layer, model.spec.num_layers
        self.num_bytes = 0
        #: Packed changes of the embedding and the output layer, by slot.
        self.ends: dict[str, PackedLora] = {}

    def layer(self, index: int) -> Iterator[tuple[str, PackedLora]]:
        """Yield slots and packed changes of one layer."""
        for slot, parts in self.parts(index):
            pack = self._pack_latent_heads if slot == LATENT_HEADS else self._pack
            yield slot, pack(parts)

    def vision(self) -> Iterator[tuple[str, PackedLora]]:
        """Yield slots and packed changes of a vision tower and its connector."""
        if self.modules.vision is None or not isinstance(self._model, VisionDecoder):
            return
        for slot, linear in self.modules.layers[self.modules.vision].items():
            deltas = [self._adapter.modules.get(part.name) for part in linear.parts]
            if not any(deltas):
                continue
            if self._model.lora_slots is not None:
                raise InvalidRequest(
                    "Adapters of vision towers aren't supported on this device.",
                    param=linear.parts[0].name,
                )
            yield slot, self._pack(self._fused(linear, self._model.encoder.layers[slot], deltas))

    def parts(self, index: int) -> Iterator[tuple[str, LayerDeltaBuilder]]:
        """Yield slots and changes of one layer before packing."""
        layers = self._model.lora_linears(index)
        for slot, linear in self.modules.layers[self._first_layer + index].items():
            deltas = [self._adapter.modules.get(part.name) for part in linear.parts]
            if any(deltas):
                if slot not in layers:
                    raise InvalidRequest(
                        f"Adapters of {linear.parts[0].name} aren't supported.",
                        param=linear.parts[0].name,
                    )
                self._check_experts(slot)
                parts = self._fused(linear, layers[slot], deltas)
                if (rows := self._local_rows(index, slot)) is not None:
                    parts.select_rows(rows)
                yield slot, parts

    def _check_experts(self, slot: str) -> None:
        """Raise `InvalidRequest` for a change of an expert that runs other engines' tokens."""
        shard = self._model.expert_shard if isinstance(self._model, NativeDecoder) else None
        if shard is not None and shard.row_ranks and "." in slot:
            raise InvalidRequest(
                f"Adapters of experts can't be used with {DATA_PARAM}={shard.ranks.size}: serve "
                "them with one engine.",
                param="model",
            )

    def _local_rows(self, index: int, slot: str) -> list[range] | None:
        """Return this rank's rows of a linear layer; None: all rows."""
        shard, linears = _shard_of(self._model), self.modules.layers[self._first_layer + index]
        if shard is None:
            if isinstance(self._model, NativeDecoder | NativeEncoder):
                return None
            split = self._model.adapted.splits.get(slot)
            return None if split is None or split.local_rows is None else [split.local_rows]
        if slot not in _SHARDED_SLOTS:
            raise _shard_error(shard.ranks.size, f"of {linears[slot].parts[0].name}")
        if slot == "qkv":
            return shard.qkv_rows
        if slot == "up":
            inner = linears["down"].columns
            return shard.up_rows(inner, gated=linears["up"].rows > inner)
        return shard.state_linear_rows(slot)

    def _fused(
        self, linear: FusedLinear, layer: AdaptableLinear, deltas: list[LoRALayer | None]
    ) -> LayerDeltaBuilder:
        """Return the change of one linear layer, with parts concatenated like its weights."""
        parts = LayerDeltaBuilder(self._model, layer, linear.bias)
        orders = self._row_orders(linear)
        first = 0
        for part, delta, order in zip(linear.parts, deltas, orders, strict=True):
            rows = part.rows if order is None else len(order)
            if delta is not None:
                parts.add(first, rows, delta, order)
            first += rows
        return parts

    def _row_orders(self, linear: FusedLinear) -> list[Tensor | None]:
        """Return the order of each part's rows in the checkpoint; None where it is unchanged."""
        spec = _full_spec(self._model)
        if not isinstance(spec, DecoderSpec):
            return [None] * len(linear.parts)
        if linear.order == "grouped":
            return [ungroup_qkv_rows(spec)]
        if linear.order == "repeated":
            twice = repeat_kv_rows(spec, linear.parts[1].rows)
            return [None, twice, twice]
        return [None] * len(linear.parts)

    def _pack(self, parts: LayerDeltaBuilder) -> PackedLora:
        slots, weights = self._model.lora_slots, parts.weights(self._dtype)
        packed = (self._model.ops.pack_lora if slots is None else slots.pack)(weights)
        self.num_bytes += packed.nbytes
        return packed

    def _pack_latent_heads(self, parts: LayerDeltaBuilder) -> PackedLora:
        model, weights = self._model, parts.weights(self._dtype)
        latents = _full_spec(model).latents
        if weights.gain is not None or weights.shift is not None:
            raise InvalidRequest(
                "DoRA and biases of kv_b_proj aren't supported: it is taken into other products.",
                param="target_modules",
            )
        packed = LatentLora(model.ops, weights, latents.qk_nope_head_dim, latents.value_size)
        self.num_bytes += packed.nbytes
        return packed

    def classifier(self, heads: ClassifierHeadFactory | None) -> Transform | None:
        """Return the classifier's head that the adapter replaces."""
        tensors, dense = self._adapter.classifier, self._adapter.dense
        if heads is None or not (tensors or dense):
            return None
        tensors = tensors | merged_dense(heads.tensors | tensors, dense)
        self.num_bytes += sum(4 * tensor.numel() for tensor in tensors.values())
        return heads.with_tensors(tensors)

    def embedding(self) -> EmbeddingLora | None:
        """Pack the change of the embedding."""
        delta, table = self._adapter.embedding, self._adapter.tables.get("embedding")
        some = self._adapter.tokens.get("embedding")
        if delta is None or (delta.a is None and table is None and some is None):
            return None
        if (slots := self._model.lora_slots) is not None:
            if delta.magnitude is not None:
                raise InvalidRequest(
                    "DoRA of an embedding isn't supported on this device.", param="use_dora"
                )
            inner = None if delta.a is None else delta.a.T
            embedding_weights = EmbeddingWeights(
                table=table, tokens=some, inner=inner, b=delta.b, scale=delta.scale
            )
            self.ends |= (packed := slots.pack_embedding(embedding_weights))
            self.num_bytes += sum(one.nbytes for one in packed.values())
            return None
        device_table = None if table is None else self._to_device(table)
        tokens = None if some is None else (some[0], self._to_device(some[1]))
        if delta.a is None or delta.b is None:
            return EmbeddingLora(table=device_table, tokens=tokens)
        rank = delta.rank
        # B's input is a row of A^T per token: the product with A becomes an identity.
        inner = self._to_device(delta.a.T.contiguous())
        weights = LoraWeights(
            a=torch.eye(rank, dtype=delta.b.dtype),
            parts=[LoraSlice(0, delta.b, 0, delta.scale)],
            out_features=delta.b.shape[0],
            gain=dora_column_scale(self._model, delta, table),
        )
        outer = self._model.ops.pack_lora(weights)
        self.num_bytes += outer.nbytes
        return EmbeddingLora(table=device_table, tokens=tokens, inner=inner, outer=outer)

    def head(self) -> HeadLora | None:
        """Pack the change of the output layer."""
        delta, table = self._adapter.head, self._adapter.tables.get("head")
        vocab_size = self._adapter.vocab_size
        if delta is None and not vocab_size:
            return None
        model = self._model
        if isinstance(model, NativeEncoder):
            raise InvalidRequest("An encoder has no output layer.", param="target_modules")
        if isinstance(model, NativeDecoder) and model.spec.normalized_head:
            raise InvalidRequest(
                "Adapters of an output layer with normalized rows aren't supported.",
                param=model.spec.names.lm_head,
            )
        layer: LinearLayer | None = None
        if table is not None:
            layer = self._table(model, table, None)
        added = None
        tokens, some = None, self._adapter.tokens.get("head")
        if vocab_size and _has_head_bias(model) and (delta is None or delta.bias is None):
            raise InvalidRequest(
                "The output layer has a bias, and the adapter brings none for its own tokens.",
                param="lm_head",
            )
        if vocab_size and isinstance(model, NativeDecoder):
            layer, some = self._extended(model, layer, some, vocab_size)
        if delta is not None and any(True for _ in delta.tensors()):
            parts = LayerDeltaBuilder(model, layer or model.lm_head, _has_head_bias(model))
            rows = next(len(tensor) for tensor in (delta.b, delta.bias) if tensor is not None)
            parts.add(0, rows, delta, None)
            added = self._pack(parts)
            self.ends[HEAD] = added
        if some is not None and len(some[0]):
            ids = some[0].to(model.ops.device)
            tokens = ids, self._table(model, some[1], ids)
        return HeadLora(table=layer, tokens=tokens, added=added)

    def _extended(
        self,
        model: NativeDecoder,
        layer: LinearLayer | None,
        some: tuple[Tensor, Tensor] | None,
        vocab_size: int,
    ) -> tuple[LinearLayer, tuple[Tensor, Tensor] | None]:
        """Return an output layer for all tokens, and the remaining rows of single tokens.

        `layer`: the adapter's table; `some`: its rows of single tokens; `vocab_size`: all tokens.
        """
        first = layer or model.lm_head
        count = first.out_features
        if some is None:
            return LMHeadWithAddedTokens(first, None, vocab_size), None
        ids, rows = some
        is_added = ids >= count
        if not bool(is_added.any()):
            return LMHeadWithAddedTokens(first, None, vocab_size), some
        more = model.ops.PackedLinear(rows[is_added].to(model.weight_dtype).contiguous(), None)
        self.num_bytes += more.nbytes
        return LMHeadWithAddedTokens(first, more, vocab_size), (ids[~is_added], rows[~is_added])

    def _table(
        self, model: NativeDecoder | TransformersModel, rows: Tensor, ids: Tensor | None
    ) -> LinearLayer:
        """Return an output layer with these rows; `ids`: their tokens, None: all tokens."""
        bias = None
        if _has_head_bias(model):
            bias = model.lm_head(zero_input(model, model.lm_head))[0]
            if ids is not None:
                bias = bias[ids]
            elif len(rows) != len(bias):  # the adapter's bias replaces the model's
                missing = len(rows) - len(bias)
                bias = torch.nn.functional.pad(bias, (0, missing))
        layer = model.ops.PackedLinear(rows.to(model.weight_dtype).contiguous(), bias)
        self.num_bytes += layer.nbytes
        return layer

    def _to_device(self, tensor: Tensor) -> Tensor:
        result = tensor.to(self._dtype or tensor.dtype).clone().to(self._model.ops.device)
        self.num_bytes += result.nbytes
        return result
