"""Ultravox (github.com/fixie-ai/ultravox): Whisper's encoder without the padding.

Each `stack_factor` states of a window are concatenated and projected to the decoder's hidden size.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from engine.contract.errors import ModelLoadError
from engine.models.families.common import ACTIVATIONS
from engine.models.layers.linear import FusedLinear, LinearPart
from engine.models.layers.norm import Norm, Transform, chain, make_norm
from engine.models.speech.whisper import (
    WhisperEncoder,
    WhisperEncoderSpec,
    find_encoder,
    make_encoder_layer,
)
from engine.models.vision.family import VisionFamily
from engine.models.weight_loader import WeightLoader
from engine.multimodal.audio import FEATURES
from engine.multimodal.audio_prompts import num_states_of
from kernels.interface import NormWeights
from kernels.layers import activation

#: Field of config.json that names the checkpoint of a part's weights -> the field with the part's
#: config, and the prefix of its weights in this model.
PART_MODELS = {
    "text_model_id": ("text_config", "language_model."),
    "audio_model_id": ("audio_config", "audio_tower."),
}
_EPS = 1e-6
_PROJECTOR = "multi_modal_projector."


class Ultravox(VisionFamily):
    """The encoder and projector of Ultravox, for windows of audio without padding."""

    kinds: ClassVar[tuple[str, ...]] = ("audio",)
    ignored_prefixes: ClassVar[tuple[str, ...]] = ("audio_tower.model.decoder.",)

    _encoder: WhisperEncoder
    _projector: Transform

    @property
    def part_folders(self) -> list[tuple[str, str]]:
        return [
            (prefix, str(self.config[name]))
            for name, (_, prefix) in PART_MODELS.items()
            if self.config.get(name)
        ]

    def load(self, loader: WeightLoader) -> None:
        prefixes = ("audio_tower.", "audio_tower.model.encoder.")
        tower = find_encoder(loader.weights, *prefixes)
        config = self.config
        self._spec = WhisperEncoderSpec.of_config(config["audio_config"])
        self._encoder = WhisperEncoder(self._spec, loader, tower)
        self._stack = int(config.get("stack_factor", 8))
        num_layers = int(config.get("num_projector_layers", 0))
        self._projector = (
            self._transformer(loader, num_layers) if num_layers else self._feed_forward(loader)
        )

    def _norm(self, loader: WeightLoader, name: str, size: int) -> Norm:
        weight = loader.vector(f"{_PROJECTOR}{name}.weight", size)
        return make_norm(loader.ops, NormWeights("rms", weight), size, _EPS)

    def _linear(
        self, loader: WeightLoader, name: str, rows: int, columns: int, *, bias: bool = False
    ) -> Transform:
        parts = (LinearPart(_PROJECTOR + name, rows),)
        return loader.linear(FusedLinear(parts=parts, columns=columns, bias=bias))

    def _feed_forward(self, loader: WeightLoader) -> Transform:
        """Two linear layers with a norm before them, and a norm after the second, or with
        `projector_ln_mid`, since version 0.5, between them.
        """
        config, inner = self.config, int(self.config.get("hidden_size", 4096))
        stacked = self._spec.hidden_size * self._stack
        out = int(config["text_config"]["hidden_size"])
        name = str(config.get("projector_act", "swiglu"))
        is_gated = name == "swiglu"
        if not is_gated and name not in ACTIVATIONS:
            raise ModelLoadError(
                f"config.json: projector_act {name!r} isn't supported.", param="projector_act"
            )
        middle = inner // 2 if is_gated else inner
        act = _gate_by_second_half if is_gated else activation(ACTIVATIONS[name])
        first = chain(
            self._norm(loader, "ln_pre", stacked),
            self._linear(loader, "linear_1", inner, stacked),
            act,
        )
        second = self._linear(loader, "linear_2", out, middle)
        if config.get("projector_ln_mid"):
            return chain(first, self._norm(loader, "ln_mid", middle), second)
        return chain(first, second, self._norm(loader, "ln_post", out))

    def _transformer(self, loader: WeightLoader, num_layers: int) -> Transform:
        """Layers like the encoder's, over the stacked states of a window."""
        spec, out = self._spec, int(self.config["text_config"]["hidden_size"])
        hidden, stacked = spec.hidden_size, spec.hidden_size * self._stack
        positions = loader.vector(f"{_PROJECTOR}embed_positions.weight", spec.length, hidden)
        layers = [
            make_encoder_layer(spec, loader, f"{_PROJECTOR}layers.{index}.")
            for index in range(num_layers)
        ]

        def run_layers(x: Tensor) -> Tensor:
            x = (x + positions[: len(x)])[None]
            for layer in layers:
                x = layer(x, None)
            return x[0]

        return chain(
            self._norm(loader, "ln_pre", stacked),
            self._linear(loader, "linear_in", hidden, stacked, bias=True),
            run_layers,
            self._norm(loader, "ln_post", hidden),
            self._linear(loader, "linear_out", out, hidden, bias=True),
        )

    def encode(self, tensors: dict[str, Tensor]) -> Tensor:
        spec, features = self._spec, tensors[FEATURES]
        self._encoder.check_features(features)
        vectors = []
        for window in features.split(2 * spec.length, dim=1):
            states = self._encoder.states(window, num_states_of(window.shape[1]))
            states = self._encoder.norm(states)
            states = pad(states, (0, 0, 0, -len(states) % self._stack))
            vectors.append(self._projector(states.view(-1, self._stack * spec.hidden_size)))
        return torch.cat(vectors)


def _gate_by_second_half(x: Tensor) -> Tensor:
    """SwiGLU with the gate in the second half."""
    values, gate = x.chunk(2, dim=-1)
    return silu(gate) * values
