"""The interface between the engine and models, including those of plug-ins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from engine.contract.messages import PoolingInfo
from engine.contract.pooling_params import GENERATE, TRANSCRIPTION
from engine.contract.replica_state import LayerReport
from engine.kv_cache.kv_cache_config import KVCacheConfig
from engine.models.forward_context import AttentionMetadata
from engine.models.layers.moe import Weights
from engine.models.lora import AdapterWeights
from engine.models.rotary_embedding import RopeSpec
from engine.multimodal.inputs import MediaTensors
from kernels import KernelSet


@dataclass(frozen=True, slots=True)
class PoolingFacts:
    """Facts about a model that returns vectors, labels or scores instead of text.

    Attributes:
        tasks: the model's tasks, the default first.
        info: information for gateways.
        encoder: whether each token attends to all others, so that prompts are computed whole and
            nothing is cached.
        caches_prefixes: whether a result depends on the last token's hidden state only.
    """

    tasks: tuple[str, ...]
    info: PoolingInfo
    encoder: bool
    caches_prefixes: bool


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model, as plain data that can be sent between processes.

    Attributes:
        architecture: its name in config.json.
        vocab_size: columns of the logits.
        hidden_size: the size of a token's hidden state.
        num_parameters: for estimates of time.
        decode_bytes: bytes of weights that a decode step of one sequence reads.
        dtype: the linear weights' dtype by its name in torch.
        max_model_len: the served context length in tokens.
        stateful: whether sequences have recurrent states.
        states_in_blocks: whether these are in blocks of the cache, so that they can be cached.
        takes_embeds: whether vectors may replace a prompt's embeddings.
        tokenizer_folder: the path of the folder with the tokenizer's files.
        eos_token_ids: tokens that end an output.
        default_sampling: the checkpoint's default sampling parameters.
        load_seconds: the duration of loading.
        pooling: None for a model that generates.
        load_report: how each layer's weights were converted; empty if not reported.
        sees: whether prompts may contain images; `takes_videos`: videos, too. hears: sound.
        bidirectional_span: the number of tokens of an image, which attend to each other; 0 for
            causal attention.
        encoder_length: the number of states of an audio encoder that tokens attend to; 0 without.
        num_mels: the number of values in a frame for this encoder.
        max_encoder_tokens: the maximum number of tokens for a text encoder; 0 without.
        decoder_start_ids: the tokens that an output then starts with.
        logits_processors: module:Class of each logits processor of its family.
        io_processor: the plug-in that reads and answers a caller's `data`; "" for none.
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
        if self.pooling is not None:
            return list(self.pooling.tasks)
        return [GENERATE, TRANSCRIPTION] if self.encoder_length else [GENERATE]

    @property
    def runs_whole_prompts(self) -> bool:
        """Whether prompts can't be computed in chunks."""
        return self.pooling is not None and self.pooling.encoder


class ModelSpec(Protocol):
    """Facts about a model that the engine plans with. `DecoderSpec` has all of them."""

    @property
    def architecture(self) -> str:
        """Its name in config.json."""

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""

    @property
    def hidden_size(self) -> int:
        """Size of a token's hidden state."""

    @property
    def max_position_embeddings(self) -> int:
        """The context length in tokens that the model was made for, before scaling by `rope`."""

    @property
    def num_layers(self) -> int:
        """Number of layers with keys and values."""

    @property
    def sliding_windows(self) -> tuple[int, ...]:
        """Each layer's sliding window in tokens, 0 for full attention; () if all are full."""

    @property
    def num_parameters(self) -> int:
        """Number of parameters, for estimates of time."""

    @property
    def rope(self) -> RopeSpec | None:
        """Rotary embedding, for the context length."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an output."""

    @property
    def dtype(self) -> str:
        """The checkpoint's dtype."""

    def kv_bytes_per_token(self, element_size: int, num_layers: int | None = None) -> int:
        """Return the bytes of KV cache per token in `num_layers` layers, by default all."""


class EngineModel(Protocol):
    """A model over the paged KV cache, such as `NativeDecoder` and `TransformersModel`.

    A class registered by a plug-in (`ModelRegistry.register_model`) is created by
    `Class(spec, ops, weight_dtype, max_model_len)` with the spec that its static method
    `make_spec(config)` reads from config.json; then `load` is called, then `allocate_kv`.

    Attributes:
        spec: facts that the engine plans with.
        stateful: whether sequences have states. Unless these are in blocks, prefixes aren't cached,
            and `keep(rows)` is called before each step with the batch's rows that still have a
            sequence.
        decode_bytes: bytes of weights that a decode step of one sequence reads.
    """

    stateful: bool

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def decode_bytes(self) -> int: ...

    def load(self, weights: Weights, progress: Callable[[int, int], None]) -> None:
        """Read all weights; may call `progress(done, total)` meanwhile."""

    def allocate_kv(
        self,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        layout: KVCacheConfig | None = None,
    ) -> None:
        """Allocate caches of `num_blocks` blocks, before the first step.

        A model that can sleep also has `release_kv()`, which releases them until the next call.
        """

    def forward(self, token_ids: Tensor, context: AttentionMetadata) -> Tensor:
        """Return [num_rows, n], the input of `logits`, for `context.logits_rows` of int64
        [num_tokens].
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 [num_rows, vocab_size]."""


@runtime_checkable
class SupportsMultiModal(Protocol):
    """A model with image, video or audio inputs."""

    def encode(self, kind: str, tensors: MediaTensors) -> Tensor:
        """Return [num_vectors, hidden] for an input, which replace its placeholder tokens.

        Args:
            kind: "image", "video" or "audio".
            tensors: the output of the model's `MediaProcessor`.
        """


@runtime_checkable
class EncoderDecoderModel(Protocol):
    """A model with cross-attention to an encoder's states."""

    def encode_to_cache(
        self, tensors: MediaTensors, block_ids: list[int], adapter: AdapterWeights | None
    ) -> None:
        """Encode an input, and write its states' keys and values, which an adapter may change, to
        blocks of the KV cache.
        """


class OutsideModel(EngineModel, Protocol):
    """Models that `ModelRegistry.register_model` accepts besides subclasses of
    `PreTrainedModel`.
    """

    def __init__(
        self, spec: ModelSpec, ops: KernelSet, weight_dtype: torch.dtype, max_model_len: int
    ) -> None: ...

    @staticmethod
    def make_spec(config: dict[str, Any]) -> ModelSpec:
        """Read config.json. Raises `ModelLoadError` for settings that the model doesn't support."""
