"""The interface between the engine and models, including those of plug-ins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.contract.messages import PoolingInfo
from engine.contract.pooling_params import GENERATE, TRANSCRIPTION
from engine.kv_cache.kv_cache_config import KVCacheConfig
from engine.models.forward_context import AttentionMetadata
from engine.models.layers.moe import Weights
from engine.models.rotary_embedding import RopeSpec
from engine.multimodal.inputs import MediaTensors
from engine.quantization.report import LayerReport
from kernels import KernelSet


@dataclass(frozen=True, slots=True)
class PoolingFacts:
    """Of a model that gives vectors, labels or scores instead of text.

    Attributes:
        tasks: what it does, the usual one first.
        info: information for gateways.
        encoder: each token sees all others: a prompt is computed whole, and nothing is cached.
        caches_prefixes: a prompt's result depends on its last token's hidden state alone.
    """

    tasks: tuple[str, ...]
    info: PoolingInfo
    encoder: bool
    caches_prefixes: bool


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model, as plain data that can cross processes.

    Attributes:
        architecture: as config.json names it.
        vocab_size: columns of the logits.
        hidden_size: of a token's hidden state.
        num_parameters: for estimates of time.
        decode_bytes: weights that a decode step of one sequence reads.
        dtype: of the linear weights, as torch names it.
        max_model_len: the context that is served, in tokens.
        stateful: sequences carry a state.
        states_in_blocks: it's in blocks of the cache, so that it can be kept and taken back.
        takes_embeds: vectors may stand in for a prompt's embeddings.
        tokenizer_folder: path of the folder with the tokenizer's files.
        eos_token_ids: what ends an output.
        default_sampling: what the checkpoint presets.
        load_seconds: how long the load took.
        pooling: None of a model that generates.
        load_report: how each layer's weights were converted; empty if not reported.
        sees: pictures may stand in its prompts; `takes_videos`: videos, too. hears: sound may.
        bidirectional_span: tokens of a picture, which see each other; 0: tokens see those before.
        encoder_length: states of an encoder of sound that its tokens attend to; 0: it has none.
        num_mels: values of a frame that this encoder reads.
        max_encoder_tokens: of a text that an encoder reads; 0: none does.
        decoder_start_ids: what an output then begins with.
        logits_processors: module:Class of each that its family brings.
        io_processor: plug-in that reads and answers a caller's `data`; "" for none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_parameters: int
    decode_bytes: int
    dtype: str
    max_model_len: int
    stateful: bool
    takes_embeds: bool
    tokenizer_folder: str
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, Any]
    load_seconds: float
    pooling: PoolingFacts | None = None
    load_report: tuple[LayerReport, ...] = ()
    io_processor: str = ""
    sees: bool = False
    hears: bool = False
    takes_videos: bool = False
    bidirectional_span: int = 0
    states_in_blocks: bool = False
    encoder_length: int = 0
    num_mels: int = 0
    max_encoder_tokens: int = 0
    decoder_start_ids: tuple[int, ...] = ()
    logits_processors: tuple[str, ...] = ()

    @property
    def tasks(self) -> list[str]:
        """The model's task."""
        if self.pooling is not None:
            return list(self.pooling.tasks)
        return [GENERATE, TRANSCRIPTION] if self.encoder_length else [GENERATE]

    @property
    def runs_whole_prompts(self) -> bool:
        """Whether a prompt can't be computed in chunks."""
        return self.pooling is not None and self.pooling.encoder


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
        """Size of a token's hidden state."""

    @property
    def max_position_embeddings(self) -> int:
        """The context that the model was made for, in tokens, before `rope` stretches it."""

    @property
    def num_layers(self) -> int:
        """Layers that keep keys and values."""

    @property
    def sliding_windows(self) -> tuple[int, ...]:
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
    """A model over the paged KV cache. `NativeDecoder` and `TransformersModel` are two.

    A class that is registered from outside (`ModelRegistry.register_model`) is made with
    `Class(spec, ops, weight_dtype, max_model_len)` from the spec that its static method
    `make_spec(config)` reads from config.json; then `load` is called, then `allocate_kv`.

    Attributes:
        spec: what the engine plans with.
        stateful: sequences carry a state. Where it isn't in blocks, prefixes aren't cached, and
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
        self,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        layout: KVCacheConfig | None = None,
    ) -> None:
        """Make the caches of `num_blocks` blocks, before the first step.

        A model that can sleep also has `release_kv()`, which lets them go until they are made anew.
        """

    def forward(self, token_ids: Tensor, context: AttentionMetadata) -> Tensor:
        """[num_rows, n] for `context.logits_rows` from int64 [num_tokens]: what `logits` takes."""

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [num_rows, vocab_size]."""


@runtime_checkable
class SupportsMultiModal(Protocol):
    """A model that sees or hears."""

    def encode(self, kind: str, tensors: MediaTensors) -> Tensor:
        """[num_vectors, hidden] of one picture: what its placeholder tokens stand for.

        Args:
            kind: "image", "video" or "audio".
            tensors: as the model's `MediaProcessor` prepared them.
        """


@runtime_checkable
class EncoderDecoderModel(Protocol):
    """A model whose tokens attend to the states of an encoder."""

    def encode_to_cache(self, tensors: MediaTensors, block_ids: list[int]) -> None:
        """Encode one input, and write its states' keys and values to blocks of the KV cache."""


class OutsideModel(EngineModel, Protocol):
    """Models that `ModelRegistry.register_model` accepts besides subclasses of
    `PreTrainedModel`.
    """

    def __init__(
        self, spec: ModelSpec, ops: KernelSet, weight_dtype: torch.dtype, max_model_len: int
    ) -> None: ...

    @staticmethod
    def make_spec(config: dict[str, Any]) -> ModelSpec:
        """From config.json. Raises `ModelLoadError` for settings that the model doesn't do."""
