"""`TransformersModel`: a causal language model of `transformers` over the paged KV cache.

All tokens of a step pass through the model as one sequence without padding; only attention
distinguishes sequences. This isn't possible for models with a recurrent state: there a step is a
pass for each prompt, and one for all decoding sequences.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from engine.kv_cache.kv_cache_config import KVCacheConfig, single_group_config
from engine.models.forward_context import AttentionMetadata
from engine.models.layers.moe import Weights
from engine.models.lora import NO_ADAPTERS, StepAdapters
from engine.models.rotary_embedding import RopeSpec
from engine.scheduler.plan import is_decode
from engine.transformers_backend.attention import (
    PagedAttentionHandler,
    PagedLayer,
    StateCache,
    gather,
    scatter,
    use_handler,
)
from engine.transformers_backend.linear import join_ranks, move
from engine.transformers_backend.lora import LoraModules
from kernels import KernelSet, LinearLayer
from kernels.lora import LayerLoras


def token_rows(starts: list[int], counts: list[int]) -> Tensor:
    """Return the rows [start, start + count) of all sequences in order, int64."""
    parts = [torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]
    return torch.cat(parts)


def select_sequences(
    context: AttentionMetadata, sequences: list[int], starts: list[int], counts: list[int]
) -> AttentionMetadata:
    """Return the context of `count` tokens from row `start` on of each sequence.

    Each sequence ends with the last of these; its later tokens follow in another pass.
    """
    host, device = context.host or context, context.positions.device
    rows = token_rows(starts, counts).to(device)
    ends = torch.tensor([start + count - 1 for start, count in zip(starts, counts, strict=True)])
    loc = torch.zeros(len(counts) + 1, dtype=torch.int32)
    loc[1:] = torch.tensor(counts).cumsum(0)
    loc, lens = loc.to(device), (host.positions[ends] + 1).to(torch.int32).to(device)
    chosen = torch.tensor(sequences).to(device)

    def part(group: AttentionMetadata) -> AttentionMetadata:
        return dataclasses.replace(
            group,
            positions=group.positions[rows],
            slot_mapping=group.slot_mapping[rows],
            block_tables=group.block_tables[chosen].contiguous(),
            seq_lens=lens,
            query_start_loc=loc,
            logits_rows=None,
            other_groups=(),
            host=None,
            adapters=group.adapters.for_rows(rows),
        )

    first, *rest = (part(group) for group in context.groups)
    return dataclasses.replace(first, other_groups=tuple(rest))


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersSpec:
    """The bridge's counterpart of `DecoderSpec`. Sizes are in elements.

    Attributes:
        num_layers: attention calls of a forward pass, each of which has a KV cache.
        kv_sizes: each one's size of keys and values per token.
        sliding_windows: each one's sliding window, 0 for full attention. () if the sizes
        differ: then all blocks are kept, and windows are applied by masking.
        state_size: the size of a sequence's recurrent state; 0 without one.
    """

    architecture: str
    vocab_size: int
    hidden_size: int = 0
    max_position_embeddings: int
    num_layers: int = 0
    kv_sizes: tuple[int, ...] = ()
    sliding_windows: tuple[int, ...] = ()
    state_size: int = 0
    num_parameters: int = 0
    rope: RopeSpec | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "float32"

    @property
    def state_bytes(self) -> int:
        """Size of a sequence's recurrent state in bytes."""
        return 4 * self.state_size

    def kv_bytes_per_token(self, element_size: int, num_layers: int | None = None) -> int:
        """Return the bytes of KV cache per token in `num_layers` layers, by default all.

        For a model without attention a token counts as its share of a state at full context length,
        so that the pool still limits the number of running sequences.
        """
        if not self.kv_sizes:
            return -(-self.state_bytes // self.max_position_embeddings)
        if num_layers is None or num_layers == self.num_layers:
            return sum(self.kv_sizes) * element_size
        return num_layers * self.kv_sizes[0] * element_size


class TransformersModel:
    """A model of `transformers` with paged attention.

    Args:
        model: the model in evaluation mode, with `PAGED` as attention implementation.
        ops: the device's kernels.
        spec: the model's description, completed by exploring it.
        decode_bytes: bytes of weights that a decode step reads, including all experts.

    Attributes:
        layers: its attention calls in order.
        stateful: whether sequences have a recurrent state outside the cache's blocks.
        continues: whether a pass over several tokens can continue from a state.
        adapted: the modules that adapters can modify. adapter_refusal: why there can be no
        adapters, or "".
    """

    adapter_refusal = ""

    def __init__(
        self, model: nn.Module, spec: TransformersSpec, ops: KernelSet, decode_bytes: int
    ) -> None:
        self.model, self.spec, self.ops = model, spec, ops
        self.decode_bytes = decode_bytes
        self.layers: list[PagedLayer] = []
        self.stateful = False
        self.continues = True
        self._arguments = frozenset(inspect.signature(model.forward).parameters)
        self._states: dict[int, StateCache] = {}
        words = getattr(model, "get_input_embeddings", None)
        self.adapted = LoraModules(model, ops, None if words is None else words())

    def to_device(self, ops: KernelSet) -> None:
        """Move to other kernels; see `linear.move`."""
        self.adapted.clear()  # they would keep the host's weights alive
        move(self.model, ops)
        # A copy, because the runner replaces its attention.
        self.ops = copy.copy(ops)
        self.adapter_refusal = "Adapters of models of the Transformers bridge run on CPUs alone."

    def join_ranks(self) -> None:
        """Share the linear layers with the other ranks from now on; see `LocalShard`."""
        join_ranks(self.model)
        self.adapted.join_ranks(self.model)

    def load(self, weights: Weights, progress: Callable[[int, int], None]) -> None:
        """Do nothing: `transformers` has read the weights."""

    def allocate_kv(
        self,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        layout: KVCacheConfig | None = None,
    ) -> None:
        """Allocate the layers' caches; layers in a slot share theirs, see `KVCacheConfig`."""
        layout = layout or single_group_config(len(self.layers))
        slots: dict[int, tuple[Tensor, Tensor]] = {}
        groups_and_slots = zip(layout.group_by_layer(), layout.slot_by_layer(), strict=True)
        for layer, (group, slot) in zip(self.layers, groups_and_slots, strict=True):
            if slot not in slots:
                shape = (num_blocks, layer.num_kv_heads, block_size, layer.size)
                slots[slot] = (
                    self.ops.new_kv_cache(shape, dtype),
                    self.ops.new_kv_cache(shape, dtype),
                )
            layer.group, layer.caches = group, slots[slot]

    def kv_cache_tensors(self) -> list[tuple[Tensor, ...]]:
        """See `NativeDecoder.kv_cache_tensors`."""
        return [layer.caches for layer in self.layers if layer.caches is not None]

    def keep(self, rows: set[int]) -> None:
        """Discard the states of all other rows of the batch."""
        for row in self._states.keys() - rows:
            del self._states[row]

    def release_kv(self) -> None:
        """Free caches and states until `allocate_kv` is called again."""
        self._states.clear()
        for layer in self.layers:
            layer.caches = None

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, context: AttentionMetadata) -> Tensor:
        """Return float32 [num_rows, vocab_size] for `logits`.

        Unlike the native decoder's hidden states these are logits, because many architectures
        transform the logits after their output layer.
        """
        if self.stateful:
            return self._forward_by_state(token_ids, context)
        rows = context.logits_rows
        return self._pass(token_ids[None], context, rows)[0]

    def logits(self, hidden: Tensor, adapters: StepAdapters = NO_ADAPTERS) -> Tensor:
        """Return `hidden`, which already contains the adapters' outputs; see `forward`."""
        return hidden

    def _pass(
        self,
        token_ids: Tensor,
        context: AttentionMetadata,
        rows: Tensor | None,
        cache: StateCache | None = None,
    ) -> Tensor:
        """Return float32 [batch, rows, vocab_size] for token ids [batch, tokens].

        rows: the tokens whose logits are returned; None for all.
        """
        arguments: dict[str, Any] = {"input_ids": token_ids, "use_cache": cache is not None}
        if cache is not None:
            arguments[self.cache_argument] = cache
        if "position_ids" in self._arguments:
            arguments["position_ids"] = context.positions.view(token_ids.shape)
        if rows is not None and "logits_to_keep" in self._arguments:
            arguments["logits_to_keep"] = rows
        run, step = PagedAttentionHandler(self.layers, context, self.ops), self.adapted.step
        sequences, tokens = token_ids.shape
        step.begin((sequences, tokens), context.adapters, arguments.get("logits_to_keep"))
        try:
            if context.encoder_embeds is not None:
                del arguments["input_ids"]
                arguments["inputs_embeds"] = self._embed(token_ids, *context.encoder_embeds)
            with use_handler(run):
                logits: Tensor = self.model(**arguments).logits
        finally:
            step.end()
        run.finish()
        if rows is not None and "logits_to_keep" not in self._arguments:
            logits = logits[:, rows]
        return logits.float()

    def _embed(self, token_ids: Tensor, indices: Tensor, vectors: Tensor) -> Tensor:
        """Return embeddings [1, tokens, hidden], with an encoder's vectors at `indices`."""
        ids = token_ids.clone()
        ids[0, indices] = 0  # a placeholder may be outside the vocabulary
        embeds: Tensor = self.model.get_input_embeddings()(ids)  # type: ignore[operator]
        embeds[0, indices] = vectors.to(embeds)
        return embeds

    @property
    def lora_slots(self) -> None:
        """Return nothing: modules are addressed by name."""
        return None

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype of linear layers' inputs, which is float32 on a CPU."""
        return torch.float32

    def lora_linears(self, layer: int) -> dict[str, LinearLayer]:
        """Return all linear layers that adapters can modify, by slot, as those of layer 0."""
        return self.adapted.linears

    @property
    def embedding(self) -> Tensor:
        """The token embedding."""
        if self.adapted.embedding is None:
            raise RuntimeError("this model's embedding can't be adapted")
        return self.adapted.embedding[1].weight

    @property
    def lm_head(self) -> LinearLayer:
        """The output layer."""
        return self.adapted.linears[self.adapted.output]

    def lora_table(self, layers: LayerLoras) -> None:
        """Return None: there is no single call for all layers."""

    @property
    def cache_argument(self) -> str:
        """The name of the cache argument of the model's forward, or ""."""
        names = ("past_key_values", "cache_params")
        return next((name for name in names if name in self._arguments), "")

    def new_cache(self) -> StateCache:
        """Return the empty state of a sequence."""
        config: Any = self.model.config
        return StateCache(config=config)

    def _forward_by_state(self, token_ids: Tensor, context: AttentionMetadata) -> Tensor:
        host = context.host or context
        starts = host.query_start_loc.tolist()
        first = host.positions[host.query_start_loc[:-1].long()].tolist()
        counts = [end - start for start, end in pairwise(starts)]
        logits_rows = host.logits_rows
        if logits_rows is None:
            logits_rows = torch.arange(len(token_ids))
        out = torch.empty(len(logits_rows), self.spec.vocab_size, device=token_ids.device)
        if host.sequence_rows is None:
            raise RuntimeError("the step doesn't say whose sequences these are")
        owners: list[int] = host.sequence_rows.tolist()
        decoding = [s for s, count in enumerate(counts) if is_decode(count) and first[s] > 0]
        passes = [[s] for s in range(len(counts)) if s not in set(decoding)]
        for sequences in ([decoding] if decoding else []) + passes:
            caches = [self._state(owners[s], first[s]) for s in sequences]
            begin = [starts[s] for s in sequences]
            # Unless the model can continue from a state, tokens after the first are read singly.
            num_tokens = counts[sequences[0]]
            at_once = first[sequences[0]] == 0 or self.continues
            strides = [(0, num_tokens)] if at_once else [(i, 1) for i in range(num_tokens)]
            for stride_start, count in strides:
                steps = [start + stride_start for start in begin]
                rows = token_rows(steps, [count] * len(steps))
                logits = self._step(
                    token_ids, context, sequences, steps, count, caches, logits_rows
                )
                indexes, _ = _matches(logits_rows, rows)
                out[indexes.to(out.device)] = logits
                for cache in caches:
                    cache.num_tokens += count
            for s, cache in zip(sequences, caches, strict=True):
                self._states[owners[s]] = cache
        return out

    def _state(self, owner: int, position: int) -> StateCache:
        """Return the state of the sequence in row `owner`, which has computed `position` tokens."""
        if position == 0:
            return self.new_cache()
        cache = self._states.pop(owner, None)
        num_tokens = 0 if cache is None else cache.num_tokens
        if cache is None or num_tokens != position:
            raise RuntimeError(
                f"the state of {num_tokens} tokens can't go on at position {position}"
            )
        return cache

    def _step(
        self,
        token_ids: Tensor,
        context: AttentionMetadata,
        sequences: list[int],
        starts: list[int],
        count: int,
        caches: list[StateCache],
        logits_rows: Tensor,
    ) -> Tensor:
        """Return the logits of the requested tokens among `count` tokens of each sequence."""
        part = select_sequences(context, sequences, starts, [count] * len(starts))
        rows = token_rows(starts, [count] * len(starts))
        local = _matches(logits_rows, rows)[1].to(token_ids.device)
        ids = token_ids[rows.to(token_ids.device)].view(len(sequences), count)
        cache = caches[0] if len(caches) == 1 else gather(caches, self.new_cache())
        if len(sequences) > 1:
            logits = self._pass(ids, part, None, cache)
            scatter(cache, caches)
            return logits.flatten(0, 1)[local]
        # An output layer requires at least one row.
        keep = local if len(local) else torch.zeros(1, dtype=torch.int64, device=local.device)
        return self._pass(ids, part, keep, cache)[0, : len(local)]


def _matches(logits_rows: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices in `wanted` and in `rows` (ascending) of the rows in both."""
    indexes = torch.searchsorted(rows, logits_rows).clamp(max=len(rows) - 1)
    matching = torch.nonzero(rows[indexes] == logits_rows).flatten()
    return matching, indexes[matching]
