"""Qwen2-Audio (arXiv 2407.10759): Whisper's encoder over the frames that hold sound, two states a
vector, and a linear projection into the decoder.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from engine.contract.errors import InvalidRequest, ModelLoadError
from engine.models.layers.linear import FusedLinear, LinearPart
from engine.models.layers.norm import Transform
from engine.models.speech.whisper import WhisperEncoder, WhisperEncoderSpec
from engine.models.vision.family import VisionFamily
from engine.models.weight_loader import WeightLoader
from engine.multimodal.audio import FEATURES
from engine.multimodal.audio_prompts import NUM_FRAMES, num_states_of


class Qwen2Audio(VisionFamily):
    """A decoder that hears and doesn't see."""

    kinds: ClassVar[tuple[str, ...]] = ("audio",)

    _encoder: WhisperEncoder
    _projector: Transform

    def load(self, loader: WeightLoader) -> None:
        prefixes = ("", "model.")
        model = next(
            (p for p in prefixes if f"{p}audio_tower.conv1.weight" in loader.weights), None
        )
        if model is None:
            raise ModelLoadError("There is no audio tower in the checkpoint.", param="model")
        spec = WhisperEncoderSpec.of_config(self.config["audio_config"])
        self._encoder = WhisperEncoder(spec, loader, f"{model}audio_tower.")
        hidden = int(self.config["text_config"]["hidden_size"])
        parts = (LinearPart(f"{model}multi_modal_projector.linear", hidden),)
        self._projector = loader.linear(
            FusedLinear(parts=parts, columns=spec.hidden_size, bias=True)
        )

    def encode(self, tensors: dict[str, Tensor]) -> Tensor:
        spec, features = self._encoder.spec, tensors[FEATURES]
        shape, num_frames = (spec.num_mels, 2 * spec.length), int(tensors[NUM_FRAMES][0])
        if features.shape != shape or not 1 <= num_frames <= shape[1]:
            raise InvalidRequest(f"Features of audio must be {list(shape)}.", param="messages")
        states = self._encoder.states(features, num_states_of(num_frames))
        pairs = states[: len(states) // 2 * 2].unflatten(0, (-1, 2)).mean(dim=1)
        return self._projector(self._encoder.norm(pairs))
