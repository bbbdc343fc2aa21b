"""Voxtral (arXiv 2507.13264): Whisper's encoder over padded windows.

Consecutive states are concatenated and projected by two linear layers to the decoder's hidden size.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from engine.models.families.common import ACTIVATIONS
from engine.models.layers.linear import FusedLinear, LinearPart
from engine.models.layers.norm import Transform, chain
from engine.models.speech.whisper import WhisperEncoder, WhisperEncoderSpec, find_encoder
from engine.models.vision.family import VisionFamily
from engine.models.weight_loader import WeightLoader
from engine.multimodal.audio import FEATURES
from kernels.layers import activation


class Voxtral(VisionFamily):
    """The encoder and projector of Voxtral, for any number of windows."""

    kinds: ClassVar[tuple[str, ...]] = ("audio",)

    _encoder: WhisperEncoder
    _projector: Transform

    def load(self, loader: WeightLoader) -> None:
        tower = find_encoder(loader.weights, "audio_tower.", "model.audio_tower.")
        spec = WhisperEncoderSpec.of_config(self.config["audio_config"])
        self._encoder = WhisperEncoder(spec, loader, tower)
        projector = tower.replace("audio_tower", "multi_modal_projector")
        hidden = int(self.config["text_config"]["hidden_size"])

        def linear(name: str, columns: int) -> Transform:
            parts = (LinearPart(projector + name, hidden),)
            return loader.linear(FusedLinear(parts=parts, columns=columns))

        self._projector = chain(
            linear("linear_1", spec.intermediate_size),
            activation(ACTIVATIONS[str(self.config["projector_hidden_act"])]),
            linear("linear_2", hidden),
        )

    def encode(self, tensors: dict[str, Tensor]) -> Tensor:
        spec, features = self._encoder.spec, tensors[FEATURES]
        window = 2 * spec.length
        self._encoder.check_features(features, window)
        states = torch.cat([self._encoder(part) for part in features.split(window, dim=1)])
        return self._projector(states.reshape(-1, spec.intermediate_size))
