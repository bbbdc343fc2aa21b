"""Loads pooling models: a transformer without an output layer, followed by pooling heads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from engine.checkpoints.load_format import open_layers
from engine.checkpoints.safetensors import DummyWeights, WeightReader
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ModelLoadError
from engine.models.attention_backend import with_attention_backend
from engine.models.decoder import NativeDecoder
from engine.models.decoder_spec import DecoderSpec
from engine.models.encoders.encoder import NativeEncoder
from engine.models.encoders.encoder_spec import EncoderSpec, encoder_spec
from engine.models.families.common import Config
from engine.models.layers.moe import Weights
from engine.models.layers.norm import Transform
from engine.models.registry import decoder_spec, native_architectures
from engine.models.sharding import ExpertShard
from engine.models.vision.dual_encoder import (
    DUAL_ENCODERS,
    DualEncoder,
    DualEncoderSpec,
    dual_encoder_spec,
)
from engine.models.vision.family import VisionDecoder, VisionFamily, locate_text
from engine.pooling.heads import (
    ClassifierHeadFactory,
    Dense,
    HeadReader,
    dense_module,
    token_head,
)
from engine.pooling.pooler import Pooler
from engine.pooling.pooling_config import PoolingModelConfig
from engine.quantization.formats.base import CheckpointFormat
from engine.text.tokenizer import load_tokenizer
from engine.text.tokenizer_folder import tokenizer_folder
from kernels import KernelSet
from kernels.interface import RankGroup

log = logging.getLogger(__name__)

_ENDINGS = ("ForSequenceClassification", "ForTokenClassification", "ForCausalLM", "Model")
#: Prefixes of weights that pooling doesn't need.
_NOT_NEEDED = (
    "cls.",
    "lm_head.",
    "score.",
    "classifier.",
    "head.",
    "vocab_",
    "pooler.",
    "decoder.",
    "logit_",
)


def pooled_spec(
    settings: PoolingModelConfig, raw: Config, vision: VisionFamily | None = None
) -> DecoderSpec | EncoderSpec:
    """Return the spec of a model whose config.json may name it without a language model head.

    `vision` is the encoder in front of its text model.

    Raises `ModelLoadError` for an architecture that isn't known.
    """
    name = settings.architecture
    if name in DUAL_ENCODERS:
        return dual_encoder_spec(raw)
    if settings.encoder:
        return encoder_spec(name, raw)
    if vision is not None:
        spec = decoder_spec(vision.text_config)
        span = vision.bidirectional_span
        return replace(spec, tie_embeddings=True, lm_head_bias=False, bidirectional_span=span)
    if name not in native_architectures():
        stem = next((name.removesuffix(end) for end in _ENDINGS if name.endswith(end)), name)
        causal = (f"{stem}ForCausalLM", f"{stem}LMHeadModel")
        name = next(
            (architecture for architecture in causal if architecture in native_architectures()), ""
        )
    if not name:
        raise ModelLoadError(
            f"{settings.architecture} isn't supported for pooling: that is done by Quire's own "
            "decoders and encoders, and none of them runs it. The Transformers bridge only "
            "generates text."
        )
    spec = decoder_spec({**raw, "architectures": [name]})
    names = spec.names
    if not names.optional_prefix and names.embedding.startswith("model."):
        # Checkpoints of the bare model omit the prefix.
        names = replace(names, optional_prefix="model.")
    # There is no output layer; marking it as tied means that none is read.
    return replace(spec, names=names, tie_embeddings=True, lm_head_bias=False)


def load_pooled(
    settings: PoolingModelConfig,
    spec: DecoderSpec | EncoderSpec,
    folder: Path,
    config: EngineConfig,
    ops: KernelSet,
    dtype: torch.dtype,
    max_model_len: int,
    progress: Callable[[int, int], None],
    form: CheckpointFormat | None = None,
    rounds: str | None = None,
    ranks: RankGroup | None = None,
    vision: VisionFamily | None = None,
    expert_shard: ExpertShard | None = None,
) -> tuple[NativeDecoder | NativeEncoder, Pooler]:
    """Load the transformer in `dtype`, and its pooler.

    `form` is the checkpoint's quantization format, `rounds` the method that rounds the
    transformer's weights while they load, `ranks` the tensor-parallel ranks of a decoder, `vision`
    the encoder in front of a decoder, and `expert_shard` this rank's experts; each may be None.

    Raises `ModelLoadError` for missing or misshapen weights.
    """
    weights = _weights(folder, config, form)
    model: NativeDecoder | NativeEncoder
    if isinstance(spec, DualEncoderSpec):
        rounds_inputs = config.round_activations and dtype == torch.bfloat16
        spec = replace(spec, round_attention=rounds_inputs)
    if isinstance(spec, EncoderSpec):
        kind = DualEncoder if isinstance(spec, DualEncoderSpec) else NativeEncoder
        model = kind(spec, ops, dtype, max_model_len, rounds)
    else:
        ops = with_attention_backend(ops, spec, dtype, config)
        if vision is not None:
            spec = locate_text(spec, weights) or spec  # a missing tensor is reported later
        decoder = NativeDecoder if vision is None else VisionDecoder
        model = decoder(
            spec,
            ops,
            dtype,
            max_model_len,
            rounds,
            ranks=ranks,
            expert_shard=expert_shard,
            reopen_weights=lambda: _weights(folder, config, form),
        )
    if isinstance(model, VisionDecoder) and vision is not None:
        model.family = vision
    model.load(weights, progress)
    pooler = _pooler(settings, spec, folder, config, weights)
    unread = [name for name in weights.unused_names() if _matters(name, spec)]
    if unread:
        log.warning("%d tensors of the checkpoint weren't used: %s", len(unread), unread[:5])
    weights.close()
    return model, pooler


def _weights(
    folder: Path, config: EngineConfig, form: CheckpointFormat | None
) -> DummyWeights | WeightReader:
    return DummyWeights() if config.load_format == "dummy" else open_layers(folder, config, form)


def _matters(name: str, spec: DecoderSpec | EncoderSpec) -> bool:
    """Whether an unread tensor indicates that config.json and weights don't belong together."""
    prefix = spec.names.prefix if isinstance(spec, EncoderSpec) else ""
    bare = name.removeprefix(prefix)
    return not bare.startswith(_NOT_NEEDED) and not bare.endswith("position_ids")


def _pooler(
    settings: PoolingModelConfig,
    spec: DecoderSpec | EncoderSpec,
    folder: Path,
    config: EngineConfig,
    weights: Weights,
) -> Pooler:
    """Load the pooler with its head or dense layers."""
    width = spec.hidden_size
    if settings.tokens and isinstance(spec, DecoderSpec):
        tokenizer = load_tokenizer(tokenizer_folder(config, folder))
        head = token_head(settings, spec, weights, tokenizer)
        return Pooler(settings, width, head=head, embedding_size=len(settings.labels))
    if settings.classifies:
        maker = head_maker(settings, spec, weights)
        return Pooler(
            settings, width, head=maker.head, maker=maker, embedding_size=len(settings.labels)
        )
    if size := settings.vector_size:
        name = "embedding_proj_layer"
        weight = weights.get(f"{name}.weight", (size, width)).float().clone()
        projection = Dense(weight, weights.get(f"{name}.bias", (size,)).float().clone())
        return Pooler(settings, width, projection=projection, embedding_size=size)
    dense = [dense_module(module) for module in settings.files.dense]
    size = dense[-1].weight.shape[0] if dense else width
    return Pooler(settings, width, dense=list(dense), embedding_size=size)


def head_maker(
    settings: PoolingModelConfig, spec: DecoderSpec | EncoderSpec, weights: Weights
) -> ClassifierHeadFactory:
    """Read a classifier's head from a checkpoint or an adapter.

    Raises `ModelLoadError` for missing or misshapen weights.
    """
    prefix = ""
    if isinstance(spec, EncoderSpec):
        embedding = f"{spec.names.prefix}{spec.names.embedding}.weight"
        prefix = spec.names.prefix if embedding in weights else ""

    def read(from_weights: Weights) -> Transform:
        return HeadReader(
            from_weights, settings.architecture, prefix, spec.hidden_size, len(settings.labels),
            spec.norm_eps,
        ).head()  # fmt: skip

    return ClassifierHeadFactory(weights, read)


def head_shapes(
    settings: PoolingModelConfig,
    spec: DecoderSpec | EncoderSpec,
    folder: Path,
    config: EngineConfig,
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a classifier head's tensors; empty for a model without one.

    Raises `ModelLoadError` for missing or misshapen weights.
    """
    if not settings.classifies or (settings.tokens and isinstance(spec, DecoderSpec)):
        return {}
    weights = _weights(folder, config, None)
    try:
        return head_maker(settings, spec, weights).shapes
    finally:
        weights.close()
