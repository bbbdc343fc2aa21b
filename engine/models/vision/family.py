"""`VisionFamily`, the encoder of a multimodal model, and `VisionDecoder`, a decoder with one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from engine.contract.errors import InvalidRequest, ModelLoadError
from engine.models.decoder import NativeDecoder
from engine.models.decoder_spec import DecoderSpec, WeightNames
from engine.models.families.common import ACTIVATIONS, Config, shared_fields
from engine.models.layers.moe import Weights
from engine.models.supports_lora import AdaptableLinear
from engine.models.vision.adapters import AdaptableEncoder, EncoderLoader
from engine.models.vision.tower import VisionSpec
from engine.models.weight_loader import WeightLoader
from engine.multimodal.inputs import EMBEDS, MediaTensors
from engine.quantization.packing import make_quant_scheme
from kernels.interface import NO_NORM
from kernels.layers import AbsentLinear
from kernels.lora import PackedLora
from kernels.tensors import to_device

#: Quantization methods that also apply to encoders, where 4 bits would be too inaccurate.
ENCODER_METHODS = ("int8", "fp8")
#: `model_type` of a `text_config` -> its architecture.
_TEXT_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_omni_text": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3VLMoeTextModel",
    "smollm3": "SmolLM3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


#: Prefixes of a language model's weights in a multimodal checkpoint: for names outside of `model.`,
#: and in place of `model.`.
_TEXT_PREFIXES = (
    ("", "model."),
    ("language_model.", "language_model.model."),
    ("", "model.language_model."),
    ("", "model.text_model."),
    ("thinker.", "thinker.model."),
    ("llm.", "llm.model."),
    ("vlm.", "vlm.language_model."),
    ("vlm.", "vlm.model.language_model."),
    ("vlm.", "vlm.model."),
)


class VisionFamily(ABC):
    """The encoder and connector of a multimodal model's architecture.

    Attributes:
        kinds: kinds of media that `encode` supports, except videos.
        takes_videos: whether `encode` supports videos.
        prunable: kinds whose vectors can be pruned, see `engine.multimodal.pruning`.
        bidirectional_span: see `DecoderSpec`.
        ignored_prefixes: prefixes of the weights of unused parts.
    """

    kinds: ClassVar[tuple[str, ...]] = ("image",)
    takes_videos: ClassVar[bool] = False
    prunable: tuple[str, ...] = ()
    bidirectional_span: int = 0
    ignored_prefixes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Config) -> None:
        """`config` is config.json with the defaults of its parts filled in."""
        self.config = config

    @abstractmethod
    def load(self, loader: WeightLoader) -> None:
        """Read the weights of encoder and connector. Raises `ModelLoadError`."""

    @abstractmethod
    def encode(self, tensors: dict[str, Tensor]) -> Tensor:
        """Return the vectors [num_vectors, hidden] of one item, given its processor's tensors."""

    @property
    def part_folders(self) -> list[tuple[str, str]]:
        """Folders with weights that the checkpoint lacks: (prefix of their names here, folder)."""
        return []

    @property
    def text_config(self) -> Config:
        """The text model's config.json, as if it were a separate checkpoint.

        Raises `ModelLoadError` for an unsupported `model_type`.
        """
        text = dict(self.config["text_config"])
        kind = str(text.get("model_type"))
        architecture = _TEXT_ARCHITECTURES.get(kind)
        if architecture is None:
            raise ModelLoadError(
                f"config.json: text_config.model_type {kind!r} isn't supported.",
                param="text_config",
            )
        text["architectures"] = [architecture]
        return text | shared_fields(self.config)


class VisionDecoder(NativeDecoder):
    """A decoder whose prompts may contain images, videos or audio."""

    family: VisionFamily
    #: The linear layers of the family's encoder, for adapters.
    encoder: AdaptableEncoder
    #: Whether the decoder has no weights.
    only_encodes = False

    @property
    def hears(self) -> bool:
        """Whether its prompts may contain audio instead of images."""
        return "audio" in self.family.kinds

    @property
    def takes_videos(self) -> bool:
        """Whether its prompts may contain videos."""
        return self.family.takes_videos

    @property
    def prunable(self) -> tuple[str, ...]:
        """Kinds of media whose vectors can be pruned."""
        return self.family.prunable

    @property
    def bidirectional_span(self) -> int:
        """See `DecoderSpec`."""
        return self.spec.bidirectional_span

    def load(self, weights: Weights, progress: Callable[[int, int], None]) -> None:
        if self.only_encodes:
            self.lm_head = self.embedding = AbsentLinear()
            self.final_norm = NO_NORM
        else:
            super().load(weights, progress)
        self.family.load(self.encoder_loader(weights))

    def lora_linears(self, layer: int) -> Mapping[str, AdaptableLinear]:
        return {} if self.only_encodes else super().lora_linears(layer)

    def encoder_loader(self, weights: Weights) -> WeightLoader:
        self.encoder = AdaptableEncoder()
        quantization = self.quantization if self.quantization in ENCODER_METHODS else None
        scheme = make_quant_scheme(quantization, self.round_inputs)
        return EncoderLoader(
            self.encoder,
            *(self.spec, self.ops, self.weight_dtype, self.max_model_len, weights, scheme),
        )

    def encode_with_adapter(
        self, kind: str, tensors: MediaTensors, deltas: Mapping[str, PackedLora]
    ) -> Tensor:
        """Like `encode`, with an adapter's additions to the encoder's linear layers."""
        self.encoder.lora.deltas = deltas
        try:
            return self.encode(kind, tensors)
        finally:
            self.encoder.lora.deltas = {}

    @torch.inference_mode()
    def encode(self, kind: str, tensors: MediaTensors) -> Tensor:
        if kind not in self.family.kinds and not (kind == "video" and self.family.takes_videos):
            raise InvalidRequest(f"{self.spec.architecture} takes no {kind}.", param="messages")
        inputs = {name: torch.from_numpy(array.copy()) for name, array in tensors.items()}
        # Grids, sizes and masks stay on the host, where families read them.
        inputs = {
            name: to_device(x, self.ops.device) if x.is_floating_point() else x
            for name, x in inputs.items()
        }
        return inputs[EMBEDS] if EMBEDS in inputs else self.family.encode(inputs)


def locate_text(spec: DecoderSpec, weights: Any) -> DecoderSpec | None:
    """Return the text model's spec with the names of its weights in this checkpoint, or None if
    they have none of the known names.

    Training and merging tools save a text model with the multimodal model's names and vice versa.
    """
    for head_prefix, body_prefix in _TEXT_PREFIXES:
        names = _prefixed(spec.names, head_prefix, body_prefix)
        if f"{names.embedding}.weight" in weights:
            return replace(spec, names=names)
    return None


def _prefixed(names: WeightNames, head_prefix: str, body_prefix: str) -> WeightNames:
    """Return a language model's names with the prefixes of `_TEXT_PREFIXES`."""

    def renamed(name: str) -> str:
        if name.startswith("model."):
            return body_prefix + name.removeprefix("model.")
        return head_prefix + name if name else name

    return replace(
        names,
        embedding=renamed(names.embedding),
        positions=renamed(names.positions),
        embedding_norm=renamed(names.embedding_norm),
        final_norm=renamed(names.final_norm),
        lm_head=renamed(names.lm_head),
        layer=renamed(names.layer),
    )


def clip_tower(vision: Config, prefix: str) -> VisionSpec:
    return make_tower_spec(
        vision, prefix, class_token=True, patch_bias=False, first_norm="pre_layrnorm", eps=1e-5
    )


def siglip_tower(vision: Config, prefix: str) -> VisionSpec:
    """Return the spec of SigLIP's vision tower."""
    return make_tower_spec(vision, prefix, last_norm="post_layernorm", eps=1e-6)


def make_tower_spec(vision: Config, prefix: str, *, eps: float, **particulars: Any) -> VisionSpec:
    """Return the spec of a `vision_config` with CLIP's field names.

    `eps` is the default of `layer_norm_eps`, `particulars` are further fields of `VisionSpec`.
    """
    return VisionSpec(
        prefix=prefix,
        hidden_size=int(vision["hidden_size"]),
        intermediate_size=int(vision["intermediate_size"]),
        num_layers=int(vision["num_hidden_layers"]),
        num_heads=int(vision["num_attention_heads"]),
        image_size=int(vision["image_size"]),
        patch_size=int(vision["patch_size"]),
        num_channels=int(vision.get("num_channels", 3)),
        activation=activation_name(vision),
        norm_eps=float(vision.get("layer_norm_eps", eps)),
        **particulars,
    )


def activation_name(config: Config) -> str:
    """Return the kernels' name of a tower's `hidden_act`. Raises `ModelLoadError`."""
    name = str(config.get("hidden_act", "gelu"))
    act = "quick_gelu" if name == "quick_gelu" else ACTIVATIONS.get(name)
    if act is None:
        raise ModelLoadError(
            f"config.json: a tower's hidden_act {name!r} isn't supported.", param="hidden_act"
        )
    return act


def tower_of(config: Config, prefix: str) -> VisionSpec:
    """Return the spec of `vision_config`. Raises `ModelLoadError` unless it is CLIP or SigLIP."""
    vision = config["vision_config"]
    kinds = {"clip_vision_model": clip_tower, "siglip_vision_model": siglip_tower}
    kind = str(vision.get("model_type"))
    if kind not in kinds:
        raise ModelLoadError(
            f"config.json: vision_config.model_type {kind!r} isn't supported.",
            param="vision_config",
        )
    return kinds[kind](vision, prefix)


def find_prefix(weights: Any, *prefixes: str) -> str:
    """Return the prefix in `prefixes` that the tower's weights have in this checkpoint.

    Raises `ModelLoadError` if none does.
    """
    for prefix in prefixes:
        if f"{prefix}embeddings.patch_embedding.weight" in weights:
            return prefix
    raise ModelLoadError("There is no vision tower in the checkpoint.")
