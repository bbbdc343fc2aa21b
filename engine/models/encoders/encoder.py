"""The native encoder: BERT and its relatives, described by `EncoderSpec`.

Sequences of a step lie one after another, without padding. There is no KV cache: a prompt is
computed whole in one step. Activations are float32 whatever the weights' dtype is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from engine.kv_cache.layout import KVLayout
from engine.models.adaptable import Adaptable
from engine.models.context import AttentionContext
from engine.models.encoders.attention import Sequences
from engine.models.encoders.build import EncoderBuilder, EncoderLayer
from engine.models.encoders.spec import EncoderSpec
from engine.models.experts import Weights
from engine.models.norms import Norm
from kernels import KernelSet, LinearLayer


class NativeEncoder(Adaptable):
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
        self, spec: EncoderSpec, ops: KernelSet, weight_dtype: torch.dtype, max_model_len: int
    ) -> None:
        super().__init__()
        self.spec = spec
        self.ops = ops
        self.weight_dtype = weight_dtype
        self.max_model_len = max_model_len
        self.layers: list[EncoderLayer] = []
        self._positions: Tensor | None = None
        self._token_types: Tensor | None = None
        self._linears: list[dict[str, LinearLayer]] = []

    def load(self, weights: Weights, progress: Callable[[int, int], None]) -> None:
        """Read all weights; `progress(done, total)` is called after each layer."""
        spec, names = self.spec, self.spec.names
        builder = EncoderBuilder(
            spec, self.ops, self.weight_dtype, self.max_model_len, weights, self._step
        )
        total = spec.num_layers + 1
        width = spec.hidden_size
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

    def linears(self, layer: int) -> Mapping[str, LinearLayer]:
        """See `Adaptable`."""
        return self._linears[layer]

    @property
    def _depth(self) -> int:
        return self.spec.num_layers

    def _slot_places(self) -> list[list[str]]:
        return [list(layer) for layer in self._linears]

    @property
    def decode_bytes(self) -> int:
        """Nothing is decoded."""
        return 0

    def allocate_kv(
        self, num_blocks: int, block_size: int, dtype: torch.dtype, layout: KVLayout | None = None
    ) -> None:
        """There is no KV cache."""

    def release_kv(self) -> None:
        """There is none to let go."""

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, context: AttentionContext, token_types: Tensor | None = None
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
        sequences = Sequences(context.query_start_loc, token_ids.device)
        positions = sequences.sorted(context.positions)
        types = None if token_types is None else sequences.sorted(token_types)
        adapters, rows = self._moved(context, lambda: sequences.places(len(token_ids)))
        ids = sequences.sorted(token_ids)
        x = self.embedding[ids].float()
        self._adapt_embedding(x, ids, adapters, rows)
        x = self._positioned(x, positions, types)
        with self._through(adapters, rows):
            for layer in self.layers:
                x = layer(x, positions, sequences)
        return sequences.restored(self._final_norm(x)).float()

    def _positioned(self, x: Tensor, positions: Tensor, token_types: Tensor | None) -> Tensor:
        """Embeddings with those of types and positions, normed; x changes."""
        if self._token_types is not None:
            types = self._token_types
            x.add_(types[0] if token_types is None or len(types) == 1 else types[token_types])
        if self._positions is not None:
            x.add_(self._positions[positions + self.spec.position_offset])
        return self._embedding_norm(x.to(self.ops.activation_dtype(self.weight_dtype)))
