"""Decoders with cross-attention to an encoder's states, and those with a text encoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.contract.errors import ModelLoadError
from engine.models.decoder import NativeDecoder
from engine.models.encoders.encoder import NativeEncoder
from engine.models.encoders.encoder_spec import EncoderSpec
from engine.models.forward_context import AttentionMetadata, allocate_kv_cache
from engine.models.layers.moe import Weights
from engine.models.lora import CROSS_KV, AdapterWeights
from engine.models.relative_position import sinusoidal_positions
from engine.multimodal.encoder_text import TOKEN_IDS
from engine.multimodal.inputs import MediaTensors


class EncoderDecoder(NativeDecoder):
    """A decoder with keys and values of an encoder's states in the KV cache.

    Attributes:
        draft: the decoder of a draft model, which gets the states of this model's encoder.
    """

    _encoder: Any
    draft: EncoderDecoder | None = None

    @property
    def encoder_length(self) -> int:
        """Maximum number of an encoder's states that tokens attend to."""
        return self.spec.cross.length if self.spec.cross is not None else 0

    def remove_encoder(self) -> None:
        """Remove the encoder: a draft model has none of its own."""
        self._encoder = None

    def allocate_states(self, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        """Allocate keys and values of an encoder's states apart from those of tokens: for a draft
        model they are in the same blocks as those of the model that it drafts for.
        """
        shape = (num_blocks, self.spec.num_kv_heads, block_size, self.spec.head_dim)
        self.cross_caches = [allocate_kv_cache(self.ops, shape, dtype) for _ in self.weights]
        self._keep_by_layer(1)

    def write_states(
        self, states: Tensor, block_ids: list[int], adapter: AdapterWeights | None
    ) -> None:
        """Write each layer's keys and values of an encoder's states, [n, hidden], to blocks of the
        cross-attention group, in order. The adapter may change them.
        """
        if self.draft is not None:
            self.draft.write_states(states.to(self.draft._activations), block_ids, None)
        block_size = self.cross_caches[0].keys.shape[2]
        positions = torch.arange(len(states), device=states.device)
        blocks = torch.tensor(block_ids, device=states.device)
        slots = blocks[positions // block_size] * block_size + positions % block_size
        for index, (layer, cache) in enumerate(zip(self.weights, self.cross_caches, strict=True)):
            if layer.cross is None:
                raise RuntimeError("A layer has no weights of cross attention.")
            both = layer.cross.kv(states)
            delta = None if adapter is None else adapter.layers[index].get(CROSS_KV)
            if delta is not None:
                self.ops.add_lora(both, states, [(delta, torch.arange(len(states)))])
            keys, values = (
                part.unflatten(-1, (-1, self.spec.head_dim)) for part in both.chunk(2, dim=-1)
            )
            self.ops.rope_and_cache(
                keys[:, :0],
                keys,
                values,
                positions,
                None,
                cache.keys,
                cache.values,
                slots,
                key_scales=cache.key_scales,
                value_scales=cache.value_scales,
            )


class TextToTextModel(EncoderDecoder):
    """BART, T5 and related models, whose encoder reads one text at a time.

    Attributes:
        text_spec: the encoder's spec.
        decoder_start_ids: the tokens that an output starts with.
    """

    text_spec: EncoderSpec
    decoder_start_ids: tuple[int, ...]

    def load(self, weights: Weights, progress: Callable[[int, int], None]) -> None:
        super().load(weights, progress)
        spec = self.text_spec
        self._encoder = NativeEncoder(
            spec, self.ops, self.weight_dtype, spec.max_position_embeddings
        )
        self._encoder.load(weights, lambda done, total: None, self.embedding.rows)
        if spec.sinusoids:
            dtype, device = self._activations, self.ops.device
            for model, length in (
                (self, self.spec.max_position_embeddings),
                (self._encoder, spec.max_position_embeddings),
            ):
                table = sinusoidal_positions(
                    length, spec.hidden_size, spec.sinusoids, spec.first_position
                )
                model.use_positions(table.to(device, dtype))
        name, shape = "final_logits_bias", (1, self.spec.vocab_size)
        self._logits_bias = None
        if name in weights:
            bias = self.encoder_loader(weights).vector(name, *shape)
            self._logits_bias = bias if bool(bias.any()) else None

    @torch.inference_mode()
    def encode_to_cache(
        self, tensors: MediaTensors, block_ids: list[int], adapter: AdapterWeights | None
    ) -> None:
        """Encode one text, and write each layer's keys and values of its states to blocks.

        Args:
            tensors: `token_ids`, int64 [n].
            block_ids: blocks of the cross-attention group, in order.
            adapter: may change the keys and values.
        """
        token_ids = torch.from_numpy(tensors[TOKEN_IDS].copy()).to(self.ops.device)
        count, none = len(token_ids), torch.empty(0, dtype=torch.int32)
        context = AttentionMetadata(
            positions=torch.arange(count, device=self.ops.device),
            slot_mapping=none,
            block_tables=none,
            seq_lens=none,
            query_start_loc=torch.tensor([0, count], dtype=torch.int32),
        )
        states = self._encoder.forward(token_ids, context)
        self.write_states(states.to(self._activations), block_ids, adapter)

    def logits(self, hidden: Tensor, *args: Any) -> Tensor:
        """See `NativeDecoder.logits`."""
        logits = super().logits(hidden, *args)
        return logits if self._logits_bias is None else logits.add_(self._logits_bias)


def read_start_ids(config: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    """Read the tokens that an output starts with: the decoder's first token, and one that is forced
    after it, from generation_config.json or else config.json. Raises `ModelLoadError` for invalid
    tokens.
    """
    settings = {**config, **{k: v for k, v in generation.items() if v is not None}}
    start = settings.get("decoder_start_token_id")
    token_ids: list[Any] = [settings.get("pad_token_id") if start is None else start]
    if (forced := settings.get("forced_bos_token_id")) is not None:
        token_ids.append(forced)
    size = config["vocab_size"]
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id < size:
            raise ModelLoadError(
                "config.json: decoder_start_token_id and forced_bos_token_id must be tokens below "
                f"{size}, got {token_id!r:.80}.",
                param="decoder_start_token_id",
            )
    return tuple(token_ids)
