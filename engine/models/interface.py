"""What the engine asks of a model, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.kv_cache.layout import KVLayout
from engine.layers.rotary import RopeSpec
from engine.models.context import AttentionContext
from engine.models.experts import Weights
from kernels import KernelSet


class ModelSpec(Protocol):
    """Facts of a model that the engine plans with. `DecoderSpec` has them all."""

    @property
    def architecture(self) -> str:
        """As config.json names it."""

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""

    @property
    def hidden_size(self) -> int:
        """Of a token's hidden state."""

    @property
    def max_position_embeddings(self) -> int:
        """The context that the model was made for, in tokens, before `rope` stretches it."""

    @property
    def num_layers(self) -> int:
        """Layers that keep keys and values."""

    @property
    def windows(self) -> tuple[int, ...]:
        """Each layer's sliding window in tokens, 0: full attention; (): all are full."""

    @property
    def num_parameters(self) -> int:
        """Parameters, for estimates of time."""

    @property
    def rope(self) -> RopeSpec | None:
        """Rotary embedding, for the context's length."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an output."""

    @property
    def dtype(self) -> str:
        """The checkpoint's."""

    def kv_bytes_per_token(self, element_size: int, num_layers: int | None = None) -> int:
        """Bytes of KV cache that one token takes over `num_layers` layers, by default all."""


class EngineModel(Protocol):
    """A model over the paged KV cache. `NativeDecoder` and `BridgeModel` are two.

    A class that is registered from outside (`ModelRegistry.register_model`) is made with
    `Class(spec, ops, weight_dtype, max_model_len)` from the spec that its static method
    `make_spec(config)` reads from config.json; then `load` is called, then `allocate_kv`.

    Attributes:
        spec: what the engine plans with.
        stateful: sequences carry a state that no block holds. Then prefixes aren't cached, and
            before a step `keep(rows)` tells which rows of the batch still have a sequence.
        decode_bytes: weights that a decode step of one sequence reads.
    """

    stateful: bool

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def decode_bytes(self) -> int: ...

    def load(self, weights: Weights, progress: Callable[[int, int], None]) -> None:
        """Read all weights; `progress(done, total)` may be called meanwhile."""

    def allocate_kv(
        self, num_blocks: int, block_size: int, dtype: torch.dtype, layout: KVLayout | None = None
    ) -> None:
        """Make the caches of `num_blocks` blocks, before the first step.

        A model that can sleep also has `release_kv()`, which lets them go until they are made anew.
        """

    def forward(self, token_ids: Tensor, context: AttentionContext) -> Tensor:
        """[num_rows, n] for `context.logits_rows` from int64 [num_tokens]: what `logits` takes."""

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [num_rows, vocab_size]."""


class OutsideModel(EngineModel, Protocol):
    """What `ModelRegistry.register_model` takes, beside subclasses of `PreTrainedModel`."""

    def __init__(
        self, spec: ModelSpec, ops: KernelSet, weight_dtype: torch.dtype, max_model_len: int
    ) -> None: ...

    @staticmethod
    def make_spec(config: dict[str, Any]) -> ModelSpec:
        """From config.json. Raises `ModelLoadError` for settings that the model doesn't do."""
