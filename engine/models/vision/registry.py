"""Multimodal architectures by their names in config.json."""

from __future__ import annotations

from typing import Any

from engine.contract.errors import ModelLoadError
from engine.models.speech.qwen2_audio import Qwen2Audio, Qwen25Omni
from engine.models.speech.ultravox import Ultravox
from engine.models.speech.voxtral import Voxtral
from engine.models.vision.family import VisionFamily
from engine.models.vision.gemma3 import Gemma3
from engine.models.vision.idefics3 import Idefics3
from engine.models.vision.internvl import InternVL
from engine.models.vision.llava import Llava, LlavaNext
from engine.models.vision.minicpmv import MiniCPMV
from engine.models.vision.phi3_vision import Phi3Vision
from engine.models.vision.pixtral import Pixtral
from engine.models.vision.qwen2_vl import ColQwen2, Qwen2VL, Qwen3VL, Qwen25VL

VISION_FAMILIES: dict[str, type[VisionFamily]] = {
    "ColQwen2ForRetrieval": ColQwen2,
    "LlavaForConditionalGeneration": Llava,
    "LlavaNextForConditionalGeneration": LlavaNext,
    "Gemma3ForConditionalGeneration": Gemma3,
    "Idefics3ForConditionalGeneration": Idefics3,
    "SmolVLMForConditionalGeneration": Idefics3,
    "InternVLForConditionalGeneration": InternVL,
    "MiniCPMV": MiniCPMV,
    "Mistral3ForConditionalGeneration": Pixtral,
    "Phi3VForCausalLM": Phi3Vision,
    "Qwen2AudioForConditionalGeneration": Qwen2Audio,
    "Qwen2_5OmniModel": Qwen25Omni,
    "Qwen2_5OmniForConditionalGeneration": Qwen25Omni,
    "Qwen2_5OmniThinkerForConditionalGeneration": Qwen25Omni,
    "Qwen2VLForConditionalGeneration": Qwen2VL,
    "Qwen2_5_VLForConditionalGeneration": Qwen25VL,
    "Qwen3VLForConditionalGeneration": Qwen3VL,
    "Qwen3VLMoeForConditionalGeneration": Qwen3VL,
    "UltravoxModel": Ultravox,
    "VoxtralForConditionalGeneration": Voxtral,
}
#: `model_type` of families without a config class in `transformers`, which have no defaults here.
_UNKNOWN_TO_TRANSFORMERS = {"minicpmv", "phi3_v"}


def find_vision_family(config: dict[str, Any]) -> VisionFamily | None:
    """Return the family of a config.json; None if its architecture isn't in `VISION_FAMILIES`.

    Raises `ModelLoadError` for an invalid config.
    """
    names = config.get("architectures") or []
    kind = next((VISION_FAMILIES[name] for name in names if name in VISION_FAMILIES), None)
    if kind is None:
        return None
    completed = complete_config(config)
    if kind is Llava and completed["vision_config"].get("model_type") == "pixtral":
        # Pixtral's checkpoints have LLaVA's architecture name.
        kind = Pixtral
    return kind(completed)


def complete_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with `transformers`' defaults of omitted fields.

    Raises `ModelLoadError` for an invalid config.
    """
    from transformers import AutoConfig

    if config.get("model_type") in _UNKNOWN_TO_TRANSFORMERS:
        return config
    try:
        if config["model_type"] == "ultravox":
            # `transformers` has config classes only for its parts.
            parts = {"text_config": "llama", "audio_config": "whisper"}
            return config | {
                name: complete_config({"model_type": kind} | config[name])
                for name, kind in parts.items()
            }
        values = {name: value for name, value in config.items() if name != "model_type"}
        completed: dict[str, Any] = AutoConfig.for_model(config["model_type"], **values).to_dict()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelLoadError(f"config.json can't be read: {error}") from error
    return completed
