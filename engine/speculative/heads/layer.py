"""`LayerDraftHeads`: draft heads that consist of one decoder layer with a paged KV cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.decoder import NativeDecoder
from engine.models.decoder_spec import DecoderSpec
from engine.models.forward_context import AttentionMetadata
from engine.models.registry import decoder_spec
from engine.models.rotary_embedding import cos_sin_table
from engine.speculative.heads.base import HeadCheckpoint
from kernels import KernelSet
from kernels.interface import ActivationSpec, AttentionArgs
from kernels.layers import gated_activation


class PagedLayer(ABC):
    """A decoder layer with its KV cache.

    A token's keys and values depend only on the layer's input. So for tokens whose output isn't
    needed, attention isn't computed.
    """

    def __init__(self, ops: KernelSet, spec: DecoderSpec) -> None:
        """`spec`: spec of the layer's attention."""
        self._ops, self._spec = ops, spec
        self._keys = self._values = torch.empty(0)

    @property
    def token_size(self) -> int:
        """Number of elements of a token's keys and values, or of its latent."""
        return self._spec.kv_bytes_per_token(1, num_layers=1)

    def allocate(self, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        """Allocate the cache."""
        shape = (num_blocks, self._spec.num_kv_heads, block_size, self._spec.head_dim)
        self._keys = self._ops.new_kv_cache(shape, dtype)
        latents = self._spec.latents is not None
        self._values = self._keys if latents else self._ops.new_kv_cache(shape, dtype)

    def copy(self, source: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> None:
        """Copy tokens within the cache: (block ids, offsets within blocks), int64 [n] each."""
        for cache in (self._keys, self._values)[: 1 if self._values is self._keys else 2]:
            cache[target[0], :, target[1]] = cache[source[0], :, source[1]]

    @abstractmethod
    def write(self, x: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Write keys and values only, for x [n, columns]; positions and slots int64 [n]."""

    @abstractmethod
    def __call__(self, x: Tensor, residual: Tensor, step: AttentionMetadata) -> Tensor:
        """Return [n, hidden]: the residual after the layer, for one token of each of n sequences.

        Args:
            x: [n, columns], the input of attention.
            residual: [n, hidden].
            step: metadata of these tokens, each of a different sequence.
        """


class HeadLayer(PagedLayer):
    """Attention, then an MLP, each added to the residual."""

    def __init__(
        self,
        source: HeadCheckpoint,
        spec: DecoderSpec,
        prefix: str,
        columns: int,
        max_model_len: int,
    ) -> None:
        """Read the weights. `prefix`: prefix of their names; `columns`: input size of attention."""
        super().__init__(source.ops, spec)
        hidden, inner = spec.hidden_size, spec.intermediate_size
        kv = [(f"{prefix}self_attn.{part}_proj", spec.kv_size) for part in ("k", "v")]
        self._q = source.stacked([(f"{prefix}self_attn.q_proj", spec.q_size)], columns)
        self._kv = source.stacked(kv, columns)
        self._o = source.stacked([(f"{prefix}self_attn.o_proj", hidden)], spec.q_size)
        up = [(f"{prefix}mlp.{part}_proj", inner) for part in ("gate", "up")]
        self._up = source.stacked(up, hidden)
        self._down = source.stacked([(f"{prefix}mlp.down_proj", hidden)], inner)
        self._norm = source.vector(f"{prefix}post_attention_layernorm.weight", hidden)
        self._q_norm, self._k_norm = (
            source.vector(name, spec.head_dim) if name in source.weights else None
            for name in (f"{prefix}self_attn.{part}_norm.weight" for part in ("q", "k"))
        )
        self._activation = gated_activation(self._ops, ActivationSpec(spec.activation))
        rope = spec.rope
        self._cos_sin = None
        if rope is not None:
            self._cos_sin = cos_sin_table(rope, max_model_len).to(source.ops.device)

    def write(self, x: Tensor, positions: Tensor, slots: Tensor) -> None:
        k, v = self._keys_values(x)
        self._write(torch.empty(k.shape, dtype=k.dtype, device=k.device), k, v, positions, slots)

    def __call__(self, x: Tensor, residual: Tensor, step: AttentionMetadata) -> Tensor:
        spec, ops = self._spec, self._ops
        q = self._q(x).unflatten(-1, (spec.num_heads, spec.head_dim))
        k, v = self._keys_values(x)
        self._write(q, k, v, step.positions, step.slot_mapping)
        args = AttentionArgs(
            q,
            self._keys,
            self._values,
            step.block_tables,
            step.seq_lens,
            step.query_start_loc,
            spec.head_dim**-0.5,
        )
        residual = residual + self._o(ops.paged_attention(args).flatten(1))
        normed = ops.rms_norm(residual, self._norm, spec.norm_eps)
        return residual + self._down(self._activation(self._up(normed)))

    def _keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        spec = self._spec
        k, v = self._kv(x).split(spec.kv_size, dim=-1)
        shape = spec.num_kv_heads, spec.head_dim
        return k.unflatten(-1, shape), v.unflatten(-1, shape)

    def _write(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, slots: Tensor) -> None:
        self._ops.rope_and_cache(
            q,
            k,
            v,
            positions,
            self._cos_sin,
            self._keys,
            self._values,
            slots,
            q_norm_weight=self._q_norm,
            k_norm_weight=self._k_norm,
            eps=self._spec.norm_eps,
            neox=self._spec.rope_neox,
        )


@dataclass(frozen=True, slots=True)
class TargetModel:
    """The model that drafts are made for.

    Attributes:
        model: the model, whose embedding and output layer heads may use.
        max_model_len: maximum length of its sequences.
    """

    model: NativeDecoder
    max_model_len: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Hidden size and vocabulary."""
        return self.model.spec.hidden_size, self.model.spec.vocab_size


class LayerDraftHeads(ABC):
    """One decoder layer. Entry j is computed from token j + 1 and the model's state at token j, and
    predicts token j + 2; for further drafts the layer's output serves as the next state.

    Attributes:
        max_drafts: maximum number of drafts per sequence.
        nbytes: bytes of the weights.
        taps: the model's layers whose inputs are its states; (): the output of the final norm.
        columns: size of the model's states; width: size of an entry's state.
        layer: the layer with its KV cache.
    """

    max_drafts = 64
    nbytes: int
    taps: tuple[int, ...] = ()
    columns: int
    width: int
    layer: PagedLayer

    @abstractmethod
    def states(self, hidden: Tensor) -> Tensor:
        """Return [n, width] from the model's states [n, columns]; both as activations."""

    @abstractmethod
    def combine_inputs(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's input and residual; tokens int64 [n], states [n, width]."""

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """Return float32 [n, vocab], the logits of the layer's output."""


def layer_spec(source: HeadCheckpoint) -> DecoderSpec:
    """Return the layer's sizes from config.json. Raises `ModelLoadError` for unsupported ones."""
    config = source.config
    source.same("vocab_size", source.vocab_size)
    if (count := source.integer("num_hidden_layers", 1, default=1)) != 1:
        raise source.error(f"it has {count} layers: only heads of one layer are run")
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        raise source.error("sliding_window is set: only heads that see all tokens are run")
    shape = {
        "hidden_size": source.hidden_size,
        "vocab_size": source.vocab_size,
        "max_position_embeddings": 2048,
    }
    return decoder_spec(
        {**shape, **config, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
    )
